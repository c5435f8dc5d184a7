"""What `uccl-ep compare` and `compare-serving` run: the method, its statistics, results and reports."""
