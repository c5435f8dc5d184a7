"""Who the ranks of a group are and how they talk: bootstrap, control connections, failures, membership."""
