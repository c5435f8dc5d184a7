"""What `uccl-ep bench` runs: one case, its peers, and the report."""
