"""No module imports one that imports it, also not inside a function. The order of the folders is import-linter's."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp

PACKAGE = "uccl_ep_serving"


def test_no_module_imports_one_that_imports_it() -> None:
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert f"{PACKAGE}.kernels.cpu.wait" in imports
    # inside a function
    assert f"{PACKAGE}.native.compiler" in imports[f"{PACKAGE}.native.groups"]
    tuple(TopologicalSorter(imports).static_order())  # raises CycleError, with the modules
