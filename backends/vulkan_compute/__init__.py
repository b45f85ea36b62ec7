"""Vulkan by its raw layer: the loader, a device with one compute queue, kernels, submits."""
