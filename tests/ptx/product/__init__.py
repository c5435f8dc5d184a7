"""The product on the machine: its ranks, proxies and kernels, held to the oracle, and made wrong on purpose."""
