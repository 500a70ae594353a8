"""IR text in, IR text out."""

import re

import pytest
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from triton_ext.passes.kernel import Kernel


def readable(text: str) -> list[str]:
    """The kernel's body, with calls of the protocol's functions written as `name(operands)`, markers too."""
    body = re.search(r"tt\.func public @\w+\(.*?\{\n(.*?)\n  \}", text, re.DOTALL)[1]
    body = re.sub(r"tt\.call @\"?triton_ext\.passes\.protocol\.(\w+?)__(?:.*\"|[^(]*)\(([^)]*)\) : .*", r"\1(\2)", body)
    body = re.sub(r"tt\.extern_elementwise (.*?) \{.*symbol = \"(\S+)\"\}.*", r"\2(\1)", body)
    body = re.sub(r" : \(.*| : (tensor|!tt\.ptr|i32|i1)\S*$", "", body, flags=re.MULTILINE)
    return [line.strip() for line in body.splitlines() if line.strip()]


@pytest.fixture
def lowered(tmp_path):
    """lowered(text, *passes): the kernel's body after some passes, as `readable` writes it."""
    context = ir.context()
    ir.load_dialects(context)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    backend.load_dialects(context)
    options = backend.parse_options({})

    def run(text, *passes):
        path = tmp_path / "kernel.ttir"
        path.write_text(text)
        module = ir.parse_mlir_module(str(path), context)
        module.context = context
        kernel = Kernel(module, backend, options)
        for step in passes:
            step.run(kernel)
        assert module.verify()
        return readable(module.str_nodebug())

    return run
