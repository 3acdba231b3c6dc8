"""Drivers: one module a hypervisor, each translating its protocol into the interface of :mod:`hypervisors.base`.

A driver knows vCPUs, bytes and devices, never containers or sandboxes.
"""
