"""``uccl-ep check`` on nodes: what it says of set-ups that work, and of those that were broken on purpose."""
