"""CPU proxies: threads that take commands from the kernels' rings and issue the writes over a transport.

The directory stands at the top level of the repository and is installed as ``uccl_ep_serving.proxy``. It
meets the kernels only in memory that :mod:`uccl_ep_serving.protocol` describes, and never imports them.

Raises:
    ImportError: when imported under the bare name ``proxy``, so that the state of the proxies never exists
        twice in one process under two names.
"""

if __name__ == "proxy":
    raise ImportError(
        "'proxy' resolved to the uccl_ep_serving source tree, because its checkout is on sys.path; "
        "import uccl_ep_serving.proxy, and start engines from another directory or with PYTHONSAFEPATH=1"
    )
