"""Each pass on the smallest kernel: what it is for, in a few lines of IR."""

import pytest

from kernels import epilogue, kernel, store, tile
from triton_ext.errors import CompileError
from triton_ext.passes import insert_sync, lower_epilogue, order_tiles, verify


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


def test_order_tiles_takes_a_ticket_and_maps_it_to_a_tile(lowered):
    body = lowered(kernel(), order_tiles)
    assert body[:2] == lines("""
        %0 = take_ticket(%arg0)
        %1:2 = tile_of_ticket(%arg0, %0)
    """)
    assert body[-3:] == lines("""
        %5 = txl.store(%arg0, %1#0, %1#1, %arg1)
        tt.store %arg2, %arg1, %5
        tt.return
    """)


def test_order_tiles_without_program_tile_takes_only_a_ticket(lowered):
    body = ["%c = arith.constant 0 : i32", "%p = tt.get_program_id x : i32", epilogue(), *store(coords="%p, %c")]
    assert [line for line in lowered(kernel(body=body), order_tiles) if "ticket" in line] == lines("""
        %0 = take_ticket(%arg0)
    """)


def test_lower_epilogue_stores_at_the_owner_and_turns_the_local_store_off(lowered):
    assert lowered(kernel(), order_tiles, lower_epilogue)[-6:] == lines("""
        %true = arith.constant true
        store_tile(%arg0, %1#0, %1#1, %arg1, %true)
        %false = arith.constant false
        %cst = arith.constant dense<false>
        tt.store %arg2, %arg1, %cst
        tt.return
    """)


def test_lower_epilogue_of_a_reduction_stages_and_reduces(lowered):
    calls = [line for line in lowered(kernel("all_reduce"), order_tiles, lower_epilogue) if "arg1, %true" in line]
    assert calls == lines("""
        store_partial(%arg0, %1#0, %1#1, %arg1, %true)
        reduce_tile(%arg0, %1#0, %1#1, %arg1, %true)
    """)


def calls_of(body):
    return [line for line in body if "(" in line and "txl." not in line]


def test_insert_sync_waits_before_the_store_and_releases_behind_it(lowered):
    assert calls_of(lowered(kernel(), verify, order_tiles, lower_epilogue, insert_sync)) == lines("""
        %0 = take_ticket(%arg0)
        announce_ready(%arg0, %0)
        check_grid(%arg0, %0)
        %1:2 = tile_of_ticket(%arg0, %0)
        wait_ready(%arg0, %1#0, %1#1)
        store_tile(%arg0, %1#0, %1#1, %arg1, %true)
        arrive(%arg0, %1#0, %1#1)
        %6 = leave(%arg0)
        finish(%arg0, %6)
    """)


def test_insert_sync_of_an_all_reduce_announces_nothing_and_waits_only_behind_its_own_stores(lowered):
    body = calls_of(lowered(kernel("all_reduce"), verify, order_tiles, lower_epilogue, insert_sync))
    assert body == lines("""
        %0 = take_ticket(%arg0)
        check_grid(%arg0, %0)
        %1:2 = tile_of_ticket(%arg0, %0)
        check_tile(%arg0, %1#0, %1#0)
        store_partial(%arg0, %1#0, %1#1, %arg1, %true)
        arrive(%arg0, %1#0, %1#1)
        wait_partials(%arg0, %1#0, %1#1)
        reduce_tile(%arg0, %1#0, %1#1, %arg1, %true)
        arrive_reduced(%arg0, %1#0, %1#1)
        %6 = leave(%arg0)
        reduce_shared(%arg0, %6)
        finish(%arg0, %6)
    """)


def test_insert_sync_of_a_reduce_scatter_sends_nothing_reduced(lowered):
    body = calls_of(lowered(kernel("reduce_scatter"), verify, order_tiles, lower_epilogue, insert_sync))
    assert [line.split("(")[0] for line in body[4:]] == [
        "wait_ready", "check_tile", "store_partial", "arrive", "wait_partials", "reduce_tile", "%6 = leave",
        "reduce_shared", "finish",
    ]  # fmt: skip


def test_every_store_of_a_kernel_is_lowered_and_synchronised(lowered):
    second = [line.replace("%m", "%n") for line in store()]
    body = [epilogue(), tile("all_to_all", 0), tile("all_to_all", 1), *store(), *second]
    names = [
        line.split("(")[0] for line in calls_of(lowered(kernel(body=body), order_tiles, lower_epilogue, insert_sync))
    ]
    assert names[4:] == ["wait_ready", "store_tile", "arrive"] * 2 + ["%7 = leave", "finish"]


def in_region(opening, inside):
    return [epilogue(), tile("all_to_all", 0), tile("all_to_all", 1), *opening, *inside, "}"]


REFUSED = {
    "one plan in two epilogues": (
        [epilogue(), epilogue("%g"), tile("all_to_all", 0), tile("all_to_all", 1), *store()],
        "already has an epilogue",
    ),
    "a store that some programs skip": (
        in_region(["%yes = arith.constant true", "scf.if %yes {"], store()),
        "store inside scf.if",
    ),
    "neither program_tile nor program_id": (
        ["%c = arith.constant 0 : i32", epilogue(), *store(coords="%c, %c")],
        "every program stores the same tile",
    ),
    "a reduction ordered by program_id": (
        ["%p = tt.get_program_id x : i32", epilogue(collective="all_reduce"), *store("all_reduce", coords="%p, %p")],
        "must come from its own program_tile",
    ),
    "a reduction of rows that a tensor names": (
        [
            epilogue(collective="all_reduce"),
            tile("all_reduce", 0),
            "%rows = tt.splat %t0 : i32 -> tensor<4x8xi32>",
            *store("all_reduce", coords="%rows, %rows", coordinate="tensor<4x8xi32>"),
        ],
        "it must be the start of the program's tile",
    ),
    "a plan that is not an argument": (
        [
            "%c = arith.constant 1 : i32",
            "%other = tt.addptr %table, %c : !tt.ptr<i64>, i32",
            epilogue().replace("%table", "%other"),
            tile("all_to_all", 0),
            tile("all_to_all", 1),
            *store(),
        ],
        "must be an argument",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_verify_refuses(lowered, case):
    body, message = REFUSED[case]
    with pytest.raises(CompileError, match=message) as error:
        lowered(kernel(body=body), verify)
    assert "kernel.ttir:" in str(error.value), "names the line"


def test_verify_accepts_a_store_in_a_loop(lowered):
    loop = ["%c0 = arith.constant 0 : i32", "%c1 = arith.constant 1 : i32", "scf.for %i = %c0 to %c1 step %c1 : i32 {"]
    lowered(kernel(body=in_region(loop, store())), verify)
