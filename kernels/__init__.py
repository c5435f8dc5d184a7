"""Kernels of dispatch and combine: the code that packs, quantises, polls flags and reduces.

The directory stands at the top level of the repository and is installed as ``uccl_ep_serving.kernels``. It
meets the proxies only in memory that :mod:`uccl_ep_serving.protocol` describes, and never imports them.

Raises:
    ImportError: when imported under the bare name ``kernels``. That name belongs to another distribution,
        which the engines look for with ``find_spec``; answering to it would silently replace that package.
"""

if __name__ == "kernels":
    raise ImportError(
        "'kernels' resolved to the uccl_ep_serving source tree, because its checkout is on sys.path; "
        "import uccl_ep_serving.kernels, and start engines from another directory or with PYTHONSAFEPATH=1"
    )
