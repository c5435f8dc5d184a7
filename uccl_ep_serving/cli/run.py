"""``uccl-ep run MODULE ...``: ``python -m MODULE ...`` with the engines' plugins loaded before it reads its arguments.

``sglang serve`` and ``vllm serve`` load them by themselves. Tools that parse a server's arguments without doing so say
``invalid choice: 'uccl_ep'``: ``sglang.compile_deep_gemm``, ``sglang.benchmark.one_batch``, launchers of routers.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from importlib.machinery import ModuleSpec
from typing import Annotated

import typer

__all__ = ["app", "load_plugins"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: By engine: where its plugins are loaded.
_LOADERS = {"sglang": ("sglang.srt.plugins", "load_plugins"), "vllm": ("vllm.plugins", "load_general_plugins")}


def load_plugins(module: str) -> None:
    """Load the plugins of the engine that ``module`` belongs to; of every installed one where its name says none."""
    named = [engine for engine in _LOADERS if module.startswith(engine)]
    for engine in named or _LOADERS:
        if importlib.util.find_spec(engine) is not None:
            package, function = _LOADERS[engine]
            getattr(importlib.import_module(package), function)()


def _runs(found: ModuleSpec) -> bool:
    """Whether ``python -m`` could run it: a module, or a package with a ``__main__``. The package is not imported:
    plugins are loaded first."""
    places = found.submodule_search_locations
    return places is None or any(finder.find_spec(f"{found.name}.__main__", places) for finder in sys.meta_path)


@app.command(
    # what stands after the module is the module's, --help included
    context_settings={"allow_interspersed_args": False, "allow_extra_args": True, "ignore_unknown_options": True}
)
def command(
    context: typer.Context,
    module: Annotated[str, typer.Argument(help="For example sglang.compile_deep_gemm.", show_default=False)],
) -> None:
    """Run a module as `python -m` would, with this package's plugin of SGLang or vLLM loaded first, so that tools which
    do not load plugins take `uccl_ep` as well. What follows MODULE goes to it.

    The working directory is not searched for modules.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:  # what is no name, or __main__
        found, reason = None, f" ({error})"
    else:
        reason = ""
    if found is None:
        typer.echo(f"run: there is no module {module} in this environment{reason}", err=True)
        raise typer.Exit(2)
    if not _runs(found):
        typer.echo(
            f"run: {module} is a package without a __main__, so it cannot be run itself. Next step: name a module of "
            "it, as in sglang.compile_deep_gemm; `sglang serve` and `vllm serve` load the plugins by themselves",
            err=True,
        )
        raise typer.Exit(2)
    load_plugins(module)
    sys.argv = [module, *context.args]
    # the processes that it spawns find it by this name
    runpy.run_module(module, run_name="__main__", alter_sys=True)
