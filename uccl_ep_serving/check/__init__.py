"""What shows, before a server starts, that a machine can serve: what ``uccl-ep check`` runs, and what it keeps."""
