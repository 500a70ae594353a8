"""Kernels as the passes get them."""

from triton_ext.passes.dialect import Spec


def spec(collective, block=(4, 8)):
    return Spec(collective, len(block), "fp32", "fp32", "fp32", 0, 4, block).encode()


def kernel(collective="all_to_all", body=None):
    """A kernel that stores %value with `collective`; or one with the given lines."""
    return "\n".join(
        [
            "module {",
            "  tt.func public @k(%table: !tt.ptr<i64>, %value: tensor<4x8xf32>, %to: tensor<4x8x!tt.ptr<f32>>) {",
            *(body or [epilogue(), tile(collective, 0), tile(collective, 1), *store(collective)]),
            "    tt.return",
            "  }",
            "}",
        ]
    )


def _extern(name, operands, symbol, libname, libpath, types):
    attributes = f'{{libname = "{libname}", libpath = "{libpath}", pure = true, symbol = "{symbol}"}}'
    return f"    {name} = tt.extern_elementwise {operands} {attributes} : {types}"


def epilogue(name="%h", collective="all_to_all"):
    return _extern(name, "%table", "txl.epilogue", spec(collective), "", "(!tt.ptr<i64>) -> !tt.ptr<i64>")


def tile(collective, dim):
    return _extern(f"%t{dim}", "%h", "txl.program_tile", spec(collective), dim, "(!tt.ptr<i64>) -> i32")


def store(collective="all_to_all", coords="%t0, %t1", handle="%h", coordinate="i32"):
    types = f"(!tt.ptr<i64>, {coordinate}, {coordinate}, tensor<4x8xf32>) -> tensor<4x8xi1>"
    return [
        _extern("%m", f"{handle}, {coords}, %value", "txl.store", spec(collective), "", types),
        "    tt.store %to, %value, %m : tensor<4x8x!tt.ptr<f32>>",
    ]
