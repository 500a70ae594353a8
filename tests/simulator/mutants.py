"""Hunts all mutants of copy_out for every collective; as a program, prints the table of docs/protocol.md."""

import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collectives import simulation
from triton_ext.simulator.mutate import hunt

# Of a reduction, tiles of one owner and of several need shapes of their own: what one lacks, the other shows.
_STORED = [{"shape": (20, 24), "block": (16, 16)}]
_REDUCED = [{"shape": (44, 24), "block": (8, 16)}, *_STORED]
CASES = {
    "all_to_all": _STORED,
    "all_gather": _STORED,
    "broadcast": [{**_STORED[0], "root": 1}],
    "put": _STORED,
    "reduce_scatter": _REDUCED,
    "all_reduce": _REDUCED,
}
#: Mutants that wait for more than they need, and are right. Who is the last owner of a tile would reduce it after its
#: rank's partial values, which no rank delays behind a wait of its own but by tiles that rank before it shares.
EQUIVALENT = {("other owner at the start of a tile", "wait_partials")}


def results(collective):
    """For every mutant of a collective, by kind, function and place: the kinds of faults that were found in it."""
    found = collections.defaultdict(set)
    for case in CASES[collective]:
        for mutant, finding in hunt(simulation(collective, **case)):
            found[mutant.kind, mutant.function, mutant.place] |= {finding.kind} if finding else set()
    return found


def missed(found):
    survivors = [mutant for mutant, faults in found.items() if not faults]
    return [place for kind, function, place in survivors if (kind, function) not in EQUIVALENT]


def table():
    rows = collections.defaultdict(dict)
    for collective in CASES:
        counts, faults = collections.Counter(), collections.defaultdict(set)
        for (kind, function, _), kinds in results(collective).items():
            if kinds or (kind, function) not in EQUIVALENT:
                counts[kind, "all"] += 1
                counts[kind, "reported"] += bool(kinds)
                faults[kind] |= kinds
        for kind, found in faults.items():
            rows[kind][collective] = f"{counts[kind, 'reported']} of {counts[kind, 'all']}"
            rows[kind].setdefault("faults", set()).update(found)
    lines = [f"| without | {' | '.join(CASES)} | reported as |", "|---|" + "---:|" * len(CASES) + "---|"]
    for kind, row in sorted(rows.items()):
        cells = [row.get(collective, "") for collective in CASES]
        lines.append(f"| {kind} | {' | '.join(cells)} | {', '.join(sorted(row['faults']))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
