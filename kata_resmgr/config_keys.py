"""The names that stand in configurations: this program's own, Kata's that it reads, and Kata's that it leaves alone.

The last only serve to tell a name of Kata's from a mistyped one (SPEC 2).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HYPERVISORS = {"qemu": "qemu", "clh": "clh", "cloud-hypervisor": "clh"}
"""Each name under which a hypervisor may be asked for, and the one that this program calls it by."""

KATA_TABLES = ("hypervisor", "runtime", "agent", "factory", "image", "netmon", "proxy", "shim")

OUR_KEYS = {
    "kata": ("config_path",),
    "resmgr": (
        "static_sandbox_resource_mgmt",
        "base",
        "compat",
        "cpuset_sizing",
        "shares_sizing",
        "over_max_vcpus",
        "rate_limiter_scaling",
        "shrink_delay",
        "deadline",
        "host_cpus",
        "host_memory",
        "tcg_unplug",
    ),
    "daemon": ("socket", "socket_group", "state", "vm_roots", "disk_roots", "log_level", "log_format"),
}
"""This program's own tables; any other key in them is refused."""

RATE_LIMITERS = tuple(
    f"{device}_rate_limiter_{limit}"
    for device in ("disk", "net")
    for limit in ("bw_max_rate", "bw_one_time_burst", "ops_max_rate", "ops_one_time_burst")
)

READ_KEYS = {
    "runtime": (
        "hypervisor_name",
        "static_sandbox_resource_mgmt",
        "sandbox_cgroup_only",
        "enable_vcpus_pinning",
    ),
    "hypervisor": (
        "default_vcpus",
        "default_maxvcpus",
        "default_memory",
        "default_maxmemory",
        "memory_slots",
        "overhead_vcpus",
        "overhead_memory",
        "enable_annotations",
        "machine_type",
        "confidential_guest",
        "enable_virtio_mem",
        "enable_hugepages",
        "enable_mem_prealloc",
        "reclaim_guest_freed_memory",
        *RATE_LIMITERS,
    ),
}
"""Kata's keys that this program reads: of ``[runtime]``, and of ``[hypervisor.<name>]``."""

OTHER_KEYS = {
    "runtime": _words(
        """
        agent_name create_container_timeout dan_conf disable_guest_empty_dir disable_guest_seccomp disable_new_netns
        emptydir_mode enable_debug enable_pprof enable_tracing experimental guest_selinux_label internetworking_model
        jaeger_endpoint jaeger_password jaeger_user keep_abnormal kubelet_root_dir log_level name pod_resource_api_sock
        sandbox_bind_mounts shared_mounts vfio_mode
        """
    ),
    "hypervisor": _words(
        """
        block_device_aio block_device_cache_direct block_device_cache_noflush block_device_cache_set
        block_device_driver block_device_logical_sector_size block_device_num_queues
        block_device_physical_sector_size block_device_queue_size cold_plug_vfio cpu_features ctlpath default_bridges
        default_gpu_model default_gpus disable_block_device_use disable_guest_selinux disable_image_nvdimm
        disable_nested_virtualization disable_nesting_checks disable_seccomp disable_selinux disable_vhost_net
        enable_debug enable_guest_swap enable_iommu enable_iommu_platform enable_iothreads
        enable_numa enable_vhost_user_store entropy_source extra_monitor_socket firmware
        firmware_volume guest_hook_path guest_memory_dump_paging guest_memory_dump_path
        guest_swap_create_threshold_secs guest_swap_path guest_swap_size_percent hot_plug_vfio hugepage_type
        hypervisor_loglevel image indep_iothreads initrd jailer_path kernel kernel_params kernel_verity_params
        machine_accelerators memory_offset msize_9p network_queues num_queues numa_mapping path pcie_root_port
        pcie_switch_port pflashes prefetch_list_path queue_size rootfs_type rootless rx_rate_limiter_max_rate
        seccomp_sandbox seccompsandbox shared_fs tdx_quote_generation_service_socket_port tx_rate_limiter_max_rate
        use_legacy_serial valid_ctlpaths valid_entropy_sources valid_file_mem_backends valid_hypervisor_paths
        valid_jailer_paths valid_vhost_user_store_paths valid_virtio_fs_daemon_paths
        vhost_user_reconnect_timeout_sec vhost_user_store_path virtio_fs_cache virtio_fs_cache_size virtio_fs_daemon
        virtio_fs_extra_args virtio_fs_queue_size vm_rootfs_driver
        """
    ),
}
"""Kata's keys that do not bear on this program, in the same tables."""

OTHER_ANNOTATIONS = {
    "runtime": _words(
        """
        agent_name create_container_timeout disable_guest_seccomp disable_new_netns enable_pprof experimental
        internetworking_model name sandbox_bind_mounts shared_mounts vfio_mode
        """
    ),
    "hypervisor": _words(
        """
        asset_hash_type blk_logical_sector_size blk_physical_sector_size block_device_aio block_device_cache_direct
        block_device_cache_noflush block_device_cache_set block_device_driver block_device_num_queues
        block_device_queue_size cc_init_data cpu_features default_gpu_model default_gpus disable_image_nvdimm
        disable_vhost_net enable_guest_swap enable_iommu enable_iommu_platform enable_iothreads
        enable_vhost_user_store entropy_source firmware firmware_hash guest_hook_path hugepage_type
        hypervisor_hash image image_hash indep_iothreads initrd initrd_hash jailer_hash jailer_path jailer_path_hash
        kernel kernel_hash kernel_params kernel_verity_params machine_accelerators memory_offset network_queues path
        path_hash pcie_root_port pcie_switch_port prefetch_files.list rootless rx_rate_limiter_max_rate shared_fs
        tx_rate_limiter_max_rate vhost_user_store_path virtio_fs_cache virtio_fs_cache_size virtio_fs_daemon
        virtio_fs_extra_args virtio_fs_queue_size
        """
    ),
}
"""Kata's annotations that do not bear on this program, by what follows the prefix for either table."""

OTHER_ANNOTATION_FAMILIES = ("block_device_", "virtio_fs_")
"""How further ones begin."""

OTHER_HYPERVISORS = frozenset({"acrn", "dragonball", "fc", "firecracker", "openvmm", "remote", "stratovirt"})
"""Kata's hypervisors that this program does not drive."""


def nearest(name: str, known: Iterable[str], likeness: float) -> str | None:
    """The one of *known* that *name* was probably meant to be; *likeness* is from 0 (anything) to 1 (the same)."""
    return next(iter(difflib.get_close_matches(name[:80], list(known), n=1, cutoff=likeness)), None)
