"""The protocol: when a device, a backend or a pair is left, and how it is proven before it is
trusted again. Pure steps per level, and `machine`, which passes events between them."""
