// Shim leads one pod's life through kata-resmgr, as a container shim does. It starts no VM itself: start one with the
// arguments that it prints, and it goes on.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"
)

func main() {
	socket := flag.String("socket", "/run/kata-resmgr/api.sock", "the daemon's socket")
	id := flag.String("id", "example", "the sandbox")
	directory := flag.String("directory", "", "where the daemon's monitor socket shall be")
	patience := flag.Duration("patience", time.Minute, "for the whole life")
	flag.Parse()
	log.SetFlags(0)
	ctx, cancel := context.WithTimeout(context.Background(), *patience)
	defer cancel()
	if err := live(ctx, NewClient(*socket), *id, *directory); err != nil {
		log.Fatal(err)
	}
}

func live(ctx context.Context, daemon *Client, id, directory string) error {
	sandbox, err := daemon.Register(ctx, id, nil, directory)
	if err != nil {
		return err
	}
	fmt.Printf("start the VM with %q\n", sandbox.VMM.Args)

	if sandbox, err = daemon.Attach(ctx, id, 0); err != nil {
		return err
	}
	tell("attached", sandbox)

	// Create: the vCPUs are plugged when the answer comes. The guest is told how many there are, and the container is
	// then created without cpu.cpus. Where this fails the shim's Create fails, and there is nothing to undo.
	resources := Resources(`{"cpu": {"quota": 150000, "period": 100000}}`)
	if sandbox, err = daemon.Create(ctx, id, "c1", resources); err != nil {
		return err
	}
	tell("created c1 with 1.5 CPUs", sandbox) // agent: OnlineCPUMem(sandbox.VCPUs.Plugged), CreateContainer

	// An update that grows: the VM first, then the agent. One that shrinks: the agent first.
	if sandbox, err = daemon.Update(ctx, id, "c1", Resources(`{"cpu": {"quota": 250000}}`)); err != nil {
		return err
	}
	tell("updated c1 to 2.5 CPUs", sandbox) // agent: OnlineCPUMem(sandbox.VCPUs.Plugged), UpdateContainer

	// The shim has been restarted meanwhile: it tells of everything anew, and nothing changes.
	updated := Resources(`{"cpu": {"quota": 250000, "period": 100000}}`)
	if sandbox, err = daemon.Resume(ctx, id, 0, map[string]Resources{"c1": updated}); err != nil {
		return err
	}
	tell("resumed", sandbox)

	if err = daemon.Delete(ctx, id, "c1"); err != nil { // at the exit of init
		return err
	}
	if err = daemon.Detach(ctx, id); err != nil { // before the VMM is killed
		return err
	}
	return daemon.Forget(ctx, id)
}

func tell(what string, sandbox *Sandbox) {
	fmt.Printf("%s: %d of %d vCPUs\n", what, sandbox.VCPUs.Plugged, sandbox.VCPUs.Desired)
}
