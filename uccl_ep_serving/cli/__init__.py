"""The ``uccl-ep`` command line: ``demo`` serves a tiny model, ``doctor`` says what this machine can do."""
