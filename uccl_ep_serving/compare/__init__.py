"""What `uccl-ep compare` runs: the method, its statistics, results and reports."""
