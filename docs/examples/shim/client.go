package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Resources is OCI's linux.resources. A shim that has the runtime-spec module passes specs.LinuxResources on as it is;
// so does this type, which keeps the JSON that containerd or CRI-O sent.
type Resources = json.RawMessage

// Sandbox is what the daemon tells about a sandbox, as far as a shim needs it.
type Sandbox struct {
	ID    string `json:"id"`
	Phase string `json:"phase"`
	Boot  struct {
		VCPUs       int   `json:"vcpus"`
		MaxVCPUs    int   `json:"maxVcpus"`
		MemoryBytes int64 `json:"memoryBytes"`
	} `json:"boot"`
	VMM struct {
		Args         []string `json:"args"`
		KernelParams []string `json:"kernelParams"`
		Monitor      string   `json:"monitor"`
	} `json:"vmm"`
	VCPUs struct {
		Desired int `json:"desired"`
		Plugged int `json:"plugged"`
		Pending int `json:"pending"`
	} `json:"vcpus"`
	Satisfied bool `json:"satisfied"`
	Converged bool `json:"converged"`
}

// Problem is an answer that is not a success (application/problem+json).
type Problem struct {
	Status     int           `json:"status"`
	Code       string        `json:"code"`
	Detail     string        `json:"detail"`
	Retryable  bool          `json:"retryable"`
	RetryAfter time.Duration `json:"-"`
}

func (p *Problem) Error() string { return fmt.Sprintf("%s (%s)", p.Detail, p.Code) }

// Client asks one daemon. It may be used by several goroutines.
type Client struct {
	http http.Client
}

// NewClient asks the daemon at the Unix socket.
func NewClient(socket string) *Client {
	return &Client{http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		IdleConnTimeout: 5 * time.Second, // the daemon closes idle connections after 10
	}}}
}

// Register makes the sandbox known. The answer says how to start the VM.
func (c *Client) Register(ctx context.Context, id string, annotations map[string]string, directory string) (*Sandbox, error) {
	body := map[string]any{"annotations": annotations}
	if directory != "" { // else the daemon makes one
		body["directory"] = directory
	}
	return ask[Sandbox](ctx, c, http.MethodPut, path(id), body)
}

// Attach lets the daemon drive the VM that runs. Until its monitor is there, it is asked again.
func (c *Client) Attach(ctx context.Context, id string, pid int) (*Sandbox, error) {
	body := map[string]any{}
	if pid != 0 {
		body["pid"] = pid
	}
	return ask[Sandbox](ctx, c, http.MethodPut, path(id, "vm"), body)
}

// Create adds a container, or replaces it. When it returns, the VM has the vCPUs and the memory.
func (c *Client) Create(ctx context.Context, id, container string, resources Resources) (*Sandbox, error) {
	return c.container(ctx, http.MethodPut, id, container, resources)
}

// Update merges resources into what the container has.
func (c *Client) Update(ctx context.Context, id, container string, resources Resources) (*Sandbox, error) {
	return c.container(ctx, http.MethodPatch, id, container, resources)
}

// Delete removes a container. It never fails for want of anything; the VM shrinks later.
func (c *Client) Delete(ctx context.Context, id, container string) error {
	_, err := ask[struct{}](ctx, c, http.MethodDelete, path(id, "containers", container), nil)
	return err
}

// Resume is for a shim that comes back: the daemon is told of the VM and of all containers anew.
func (c *Client) Resume(ctx context.Context, id string, pid int, containers map[string]Resources) (*Sandbox, error) {
	if _, err := c.Attach(ctx, id, pid); err != nil {
		return nil, err
	}
	table := map[string]any{}
	for name, resources := range containers {
		table[name] = map[string]any{"resources": resources}
	}
	return ask[Sandbox](ctx, c, http.MethodPut, path(id, "containers"), map[string]any{"containers": table})
}

// Detach lets go of the VM: before the VMM is killed, or the daemon would report it as lost.
func (c *Client) Detach(ctx context.Context, id string) error {
	_, err := ask[struct{}](ctx, c, http.MethodDelete, path(id, "vm"), nil)
	return err
}

// Forget ends it.
func (c *Client) Forget(ctx context.Context, id string) error {
	_, err := ask[struct{}](ctx, c, http.MethodDelete, path(id), nil)
	return err
}

func (c *Client) container(ctx context.Context, method, id, name string, resources Resources) (*Sandbox, error) {
	type result struct {
		Sandbox Sandbox `json:"sandbox"`
	}
	answer, err := ask[result](ctx, c, method, path(id, "containers", name), map[string]any{"resources": resources})
	if err != nil {
		return nil, err
	}
	return &answer.Sandbox, nil
}

func path(id string, more ...string) string {
	told := "/v1/sandboxes/" + url.PathEscape(id)
	for _, part := range more {
		told += "/" + url.PathEscape(part)
	}
	return told
}

// ask repeats a request for as long as that may help and the context allows it. Every request may be repeated: PUT and
// DELETE by their nature, PATCH because it states values, not differences.
func ask[T any](ctx context.Context, c *Client, method, target string, body any) (*T, error) {
	for {
		answer, err := once[T](ctx, c, method, target, body)
		pause := 100 * time.Millisecond // no connection: the daemon is being restarted
		var problem *Problem
		if errors.As(err, &problem) {
			if !problem.Retryable {
				return nil, err
			}
			pause = max(pause, problem.RetryAfter)
		}
		if err == nil {
			return answer, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(err, ctx.Err())
		case <-time.After(pause):
		}
	}
}

func once[T any](ctx context.Context, c *Client, method, target string, body any) (*T, error) {
	var text io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		text = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://localhost"+target, text)
	if err != nil {
		return nil, err
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode >= 400 {
		problem := &Problem{Status: response.StatusCode}
		if err := json.NewDecoder(response.Body).Decode(problem); err != nil {
			return nil, fmt.Errorf("status %d: %w", response.StatusCode, err)
		}
		if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil {
			problem.RetryAfter = time.Duration(seconds) * time.Second
		}
		return nil, problem
	}
	answer := new(T)
	if response.StatusCode == http.StatusNoContent {
		return answer, nil
	}
	return answer, json.NewDecoder(response.Body).Decode(answer)
}
