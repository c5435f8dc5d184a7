"""``uccl-ep compare``: what its statistics claim, what it measures, keeps and says."""
