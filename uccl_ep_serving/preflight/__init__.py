"""``uccl-ep check`` on one node or several: connects, writes and serves as a job would; what stands in the way."""
