"""What the host does around one dispatch or combine: low-latency and normal mode, on CPU and GPU tensors."""
