"""The demos: a tiny checkpoint, a real server on CPU ranks, its client, and what each engine needs without a GPU."""
