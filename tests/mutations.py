"""Does the short suite notice when the code is wrong? Break a copy of it in one place after the other, and see.

    python tests/mutations.py                # all; `make mutations`
    python tests/mutations.py fill ring      # those whose names contain one of these words
    python tests/mutations.py --list         # only check that every anchor is still there

A mutation replaces a text that stands exactly once in its folder. A text that moved or was reworded is an error, not
a mutation that was caught: mend the record. Each one is tried on a copy of `src`, with the tests of the short suite
that should notice it. These must pass on the code as it is: what fails anyway notices nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src") / "shardstep" / "_src"


class Mutation(NamedTuple):
    name: str
    folder: str  # or a file, under the package
    old: str
    new: str
    tests: str  # as pytest takes them: paths below tests/, then perhaps -k and what to select


class Broken(Exception):
    """A record that fits the code no longer."""


MUTATIONS = [
    Mutation(
        "an all-to-all around an axis further in",
        "core/moves.py",
        "return all(j < move.axis and p == Split(max(_dims(p))) for j, p in near)",
        "return True",
        "runtime/test_conversions.py -k three_axes",
    ),
    Mutation(
        "rows of one stack take turns on the axes",
        "planning/torus_order.py",
        "families(program, state, stacks=True)",
        "families(program, state)",
        "test_matrix_optimizers.py -k torus",
    ),
    Mutation(
        "what was left as it lay is asked for first",
        "planning/propagation/preferences.py",
        "            if stays[i]:\n                continue\n",
        "",
        "test_matrix_optimizers.py -k torus",
    ),
    Mutation(
        "any row is its own",
        "capture/own_rows.py",
        "if d is None or dim not in collapsed or operand.array.shape[dim] != indices.array.shape[d]:",
        "if d is None or dim not in collapsed:",
        "capture/test_own_rows.py -k elsewhere",
    ),
    Mutation(
        "a layer turned in another order",
        "capture/saved_layers.py",
        "turns.insert(0, maker)",
        "turns.append(maker)",
        "capture/test_saved_layers.py -k 'not_saved and reshaped'",
    ),
    Mutation(
        "a stack read twice by one loop",
        "capture/saved_layers.py",
        "if found.stack not in layers:",
        "if True:",
        "capture/test_saved_layers.py -k 'not_saved and transposed'",
    ),
    Mutation(
        "replicas of an inner map in another order",
        "capture/inner_maps.py",
        "order += [*(leading.index(name) for name in names), len(leading) + dim]",
        "order += [len(leading) + dim, *(leading.index(name) for name in names)]",
        "capture/test_inner_maps.py -k 'a_piece and roll'",
    ),
    Mutation(
        "keys that come back without their replicas",
        "capture/one_each.py",
        "result[start:stop] = [jnp.asarray(x)[None] for x in leaves[start:stop]]",
        "pass",
        "capture/test_one_each.py -k come_back",
    ),
    Mutation(
        "waiting in a loop that others have left",
        "planning/propagation/loops.py",
        'if sent := next((f"{e.primitive} at {e.line}" for e in written), ""):',
        'if sent := "":',
        "planning/propagation/test_loops.py -k replicas_that_communicate",
    ),
    Mutation(
        "time taken for examples",
        "planning/batch_choice.py",
        "if turned and self.cost(turned) < self.cost(best) and self.sent(turned) <= self.sent(best):",
        "if False:",
        "planning/test_batch_choice.py -k 'found_without and time_major'",
    ),
    Mutation(
        "drawn examples whole",
        "planning/propagation/forward.py",
        "self.examples.update(self.drawn)",
        "self.examples.update(())",
        "planning/test_batch_choice.py -k 'makes_itself and draws_its_data'",
    ),
    Mutation(
        "gathers in front of a loop unsaid",
        "planning/propagation/forward.py",
        "moved += cost(placements[0], REPLICATED, atom.array, axis)",
        "moved += 0.0",
        "planning/propagation/test_microbatches.py -k 'not_divide and sliced'",
    ),
    Mutation(
        "examples never go to weights",
        "planning/propagation/forward.py",
        "return waits or (decision.visit.on_trial and not self.visits)",
        "return waits or decision.visit.on_trial",
        "planning/test_visits.py -k few_examples",
    ),
    Mutation(
        "examples never go to weights in loops",
        "planning/propagation/forward.py",
        "if self.drawn or self.in_loops.visits:",
        "if self.drawn:",
        "planning/test_visits_in_loops.py -k weights_size_moves",
    ),
    Mutation(
        "examples go to weights in loops whatever is sent",
        "planning/visits.py",
        "return little and worth(visited, otherwise)",
        "return worth(visited, otherwise)",
        "planning/test_visits_in_loops.py -k more_is_not_sent",
    ),
    Mutation(
        "16-bit operands of products multiplied as they are",
        "planning/buffers.py",
        "if narrow is None or narrow.nbytes > narrow.narrow or not _is_narrow(atom.array):",
        "if narrow is not None:",
        "planning/test_memory.py -k operands_of_products",
    ),
    Mutation(
        "terms of a sum visit, though it is reduced for another one",
        "planning/propagation/apart.py",
        "return self._terms(equation, k, split) < cost(",
        "return 0 < cost(",
        "planning/test_tables.py -k another_one_cannot",
    ),
    Mutation(
        "examples go to small weights",
        "planning/visits.py",
        "max(LEAST, (1 - WORTH) * sent(schedule))",
        "(1 - WORTH) * sent(schedule)",
        "planning/test_visits.py -k small_weights",
    ),
    # -- rules ----------------------------------------------------------------------------------------------------
    Mutation(
        "visitors never go home",
        "rules/contraction.py",
        "visit = Visit(homes, on_trial=True)",
        "visit = Visit(on_trial=True)",
        "rules/test_contraction.py -k examples_visit",
    ),
    Mutation(
        "product of two sums left open",
        "rules/elementwise.py",
        "placements.count(PARTIAL) == 1 else None",
        "placements.count(PARTIAL) >= 1 else None",
        "rules/test_elementwise.py -k mul",
    ),
    Mutation(
        "casts that round each term",
        "rules/elementwise.py",
        "if jnp.promote_types(old, new) == new and old != np.bool_ else None",
        "if old != np.bool_ else None",
        "rules/test_elementwise.py -k cast",
    ),
    Mutation(
        "choice by a predicate that is a term",
        "rules/elementwise.py",
        "if placements[0] == REPLICATED else None",
        "if placements else None",
        "rules/test_elementwise.py -k choice",
    ),
    Mutation(
        "contracted index kept",
        "rules/contraction.py",
        "yield Index(lhs.shape[i], (Split(i), Split(j)), (None,))",
        "yield Index(lhs.shape[i], (Split(i), Split(j)), (Split(0),))",
        "rules/test_contraction.py -k matmul",
    ),
    Mutation(
        "no fill of padding that is summed",
        "rules/contraction.py",
        "fill=tuple(None if place is None else op for place in self.operands) if reduced else ()",
        "fill=()",
        "rules/test_reduction.py -k reductions",
    ),
    Mutation(
        "convolution groups uncounted",
        "rules/contraction.py",
        "(Split(out_o),), counted_by=count)",
        "(Split(out_o),))",
        "rules/test_contraction.py -k conv",
    ),
    Mutation(
        "bitwise reductions as maxima",
        "rules/reduction.py",
        "return dtype == np.bool_",
        "return True",
        "rules/test_reduction.py -k 'reductions or offers or bit'",
    ),
    Mutation(
        "scans cut along their axis",
        "rules/reduction.py",
        "if d != along:",
        "if True:",
        "rules/test_reduction.py -k cumulative",
    ),
    Mutation(
        "pooling windows cut",
        "rules/reduction.py",
        "return site.window_dimensions[d] == 1 and not moves and not dilated",
        "return not moves and not dilated",
        "rules/test_reduction.py -k pool",
    ),
    Mutation(
        "reshape loses the outer factor",
        "rules/shape.py",
        "return split.on(dim, outer // before)",
        "return split.on(dim)",
        "rules/test_shape.py -k reshape",
    ),
    Mutation(
        "tile forgets its copies",
        "rules/shape.py",
        "split.outer * site.reps[split.dim]",
        "split.outer",
        "rules/test_shape.py -k tile",
    ),
    Mutation(
        "iota without offset",
        "rules/shape.py",
        "block.local, dim) + block.offsets[dim]",
        "block.local, dim)",
        "rules/test_shape.py -k iota",
    ),
    Mutation(
        "fill that is no term of a sum",
        "rules/indexing.py",
        "or operand != PARTIAL or fill == 0 or fill != fill",
        "or True",
        "rules/test_indexing.py",
    ),
    Mutation(
        "windows that need not be whole",
        "rules/indexing.py",
        "if size == taken]",
        "if size >= taken]",
        "rules/test_indexing.py -k dynamic",
    ),
    Mutation(
        "columns and rows of a solve exchanged",
        "rules/linalg.py",
        "if site.left_side else",
        "if not site.left_side else",
        "rules/test_linalg.py -k triangular",
    ),
    Mutation(
        "random counter by local rows",
        "rules/random.py",
        "stride = math.prod(block.shape[d + 1 :])",
        "stride = math.prod(block.local[d + 1 :])",
        "rules/test_random.py -k slice",
    ),
    Mutation(
        "rbg drawn key by key",
        "rules/random.py",
        "_DRAWS_KEY_BY_KEY = _COUNTER_BASED\n",
        '_DRAWS_KEY_BY_KEY = _COUNTER_BASED | {"rbg"}\n',
        "rules/test_random.py -k one_stream",
    ),
    Mutation(
        "psum of what all replicas have",
        "rules/parallel.py",
        'n = lax.axis_size(local.axes) if op == "add" else 1',
        "n = 1",
        "test_per_replica.py -k psum",
    ),
    Mutation(
        "wrong neutral element",
        "rules/contract.py",
        '-np.inf if op == "max" else np.inf',
        'np.inf if op == "max" else -np.inf',
        "rules/test_reduction.py -k reductions",
    ),
    Mutation(
        "one row of padding unfilled",
        "rules/contract.py",
        "place < block.shape[d]",
        "place <= block.shape[d]",
        "rules/test_reduction.py -k reductions",
    ),
    Mutation(
        "every replica calls the host",
        "rules/effects.py",
        "lax.cond(lax.axis_index(local.axes) == 0, call, skip",
        "lax.cond(lax.axis_index(local.axes) >= 0, call, skip",
        "test_callbacks.py -k 'results_of_an_io_callback'",
    ),
    Mutation(
        "rows of a stack that nobody owns",
        "rules/stacked.py",
        "owned = tuple(Split(0) if rows else REPLICATED",
        "owned = tuple(REPLICATED if rows else REPLICATED",
        "rules/test_golden.py -k every_rule",
    ),
    # -- layouts and conversions ----------------------------------------------------------------------------------
    Mutation(
        "axes nest the other way at rest",
        "core/layout.py",
        "names[placement.dim].extend(axis.names)",
        "names[placement.dim][:0] = axis.names",
        "test_equality.py machine/test_topology.py -k 'two_data_axes or torus'",
    ),
    Mutation(
        "a term on every replica",
        "",
        "jnp.where(lax.axis_index(axis.name) == 0,",
        "jnp.where(lax.axis_index(axis.name) >= 0,",
        "runtime/test_conversions.py",
    ),
    Mutation(
        "everybody takes the first block",
        "",
        "lax.axis_index(axis.name) * size, size, d",
        "0 * size, size, d",
        "runtime/test_conversions.py",
    ),
    Mutation(
        "blocks put together across",
        "",
        "jnp.moveaxis(blocks, 0, dim).reshape(block)",
        "blocks.reshape(block)",
        "runtime/test_conversions.py",
    ),
    Mutation(
        "ring begins with the wrong block",
        "runtime/ring_scatter.py",
        "total = term(here - 1, start, length)",
        "total = term(here, start, length)",
        "runtime/test_ring_scatter.py",
    ),
    # -- packing --------------------------------------------------------------------------------------------------
    Mutation(
        "buckets above their limit",
        "planning",
        "if bucket and held + w.nbytes > limit:",
        "if bucket and held > limit:",
        "planning/test_buckets.py",
    ),
    Mutation(
        "buckets that arrive too late",
        "planning",
        "shared[min(w.needed for w in members)]",
        "shared[max(w.needed for w in members)]",
        "planning/test_buckets.py",
    ),
    # -- loops ----------------------------------------------------------------------------------------------------
    Mutation(
        "a sum written over what is read afterwards",
        "planning/added_in_loops.py",
        "read = (k < i or k == found.add for k in self.readers[other])",
        "read = (True for k in self.readers[other])",
        "planning/test_layers_in_microbatches.py -k 'other_stacks_stay'",
    ),
    Mutation(
        "a stack added in the loop and read once more",
        "planning/added_in_loops.py",
        "return None if len(readers) != 1 or stack in self.moved or stack in self.returned else readers[0]",
        "return readers[0]",
        "planning/test_layers_in_microbatches.py -k 'other_stacks_stay and twice'",
    ),
    Mutation(
        "rows counted upwards in a loop that runs backwards",
        "planning/added_in_loops.py",
        "body = _Body(step.bodies[0], at, carries, -1 if reverse else 1)",
        "body = _Body(step.bodies[0], at, carries, 1)",
        "planning/test_layers_in_microbatches.py -k 'plain_step and sent and 8'",
    ),
    Mutation(
        "layers gathered in front of the microbatches in any case",
        "planning/propagation/carries.py",
        "x if i in self.streamed else x.hoisted(preferences)",
        "x.hoisted(preferences)",
        "planning/test_layers_in_microbatches.py -k 'what_is_sent and held and float32'",
    ),
    Mutation(
        "sums kept whole where that is as fast",
        "planning/propagation/carries.py",
        "if not least[1].collectives or self.sums:",
        "if not least[1].collectives:",
        "planning/test_layers_in_microbatches.py -k several_axes",
    ),
    Mutation(
        "casts of layers left inside the microbatches",
        "planning/problem.py",
        "casts_in_front(captured.program, None if how.gathers_once else ())",
        "captured.program",
        "planning/test_layers_in_microbatches.py -k 'what_is_sent and cast'",
    ),
    Mutation(
        "what loops carry predicted twice",
        "planning/memory.py",
        "or buffer.over is argument",
        "",
        "planning/test_memory.py -k loop_over_steps",
    ),
    Mutation(
        "carry that is more than a sum",
        "planning/propagation/microbatches.py",
        "if len(terms) != 1:",
        "if not terms:",
        "planning/propagation/test_microbatches.py -k doubling",
    ),
    Mutation(
        "microbatches that examples can tell apart",
        "planning/propagation/microbatches.py",
        "return not alone.collectives and examples > 1",
        "return examples > 1",
        "planning/propagation/test_microbatches.py planning/propagation/test_loops.py -k 'microbatches or matters'",
    ),
    Mutation(
        "loop inputs gathered in every iteration",
        "planning/propagation",
        "gathered = [not isinstance(p, Varying) and d.full for",
        "gathered = [False for",
        "planning/propagation/test_loops.py -k 'moments or matters or bytes or layers'",
    ),
    Mutation(
        "predicates that differ between replicas",
        "planning/propagation",
        "if any(isinstance(p, Varying) for p in found):",
        "if False:",
        "planning/propagation/test_loops.py -k predicate",
    ),
    Mutation(
        "layers of a stack are nobody's slices",
        "planning/sliced.py",
        ".update({0}, (d + 1 for d in inside))",
        ".update((d + 1 for d in inside))",
        "planning/test_sliced.py -k 'along_its_layers or left_whole'",
    ),
    # -- choices of the planner -----------------------------------------------------------------------------------
    Mutation(
        "the memo takes state for examples",
        "core/layout.py",
        "found.append(value.batch)",
        "found.append(False)",
        "planning/propagation/test_memo.py",
    ),
    Mutation(
        "what does not fit is taken",
        "planning/weights.py",
        "if chosen.fits and not might_save(chosen):",
        "if not might_save(chosen):",
        "planning/test_memory.py -k 'replicated_ones_do_not_fit'",
    ),
    Mutation(
        "inner axes on the dimension that is taken",
        "planning/placement.py",
        "key=lambda d: (d in taken, d)",
        "key=lambda d: (d not in taken, d)",
        "machine/test_topology.py",
    ),
    Mutation(
        "torus axes never take turns",
        "planning/torus_order.py",
        "key=lambda c: max(loads[c])",
        "key=lambda c: 0",
        "planning/test_torus_order.py",
    ),
    Mutation(
        "weights rounded for those who are no examples",
        "planning/precision.py",
        "return bool(readers) and all(",
        "return bool(readers) or all(",
        "planning/test_precision.py -k elsewhere",
    ),
    Mutation(
        "sums put off in a fixed order",
        "planning/propagation/forward.py",
        "if not self.memo.sums_at_once or PARTIAL",
        "if True or PARTIAL",
        "runtime/test_fixed_order.py -k 'bits and accumulating and float32'",
    ),
    Mutation(
        "an 8-bit wire scales by what padding holds",
        "runtime/packing.py",
        "if t.wire is None or not t.wire.scaled:",
        "if True:",
        "runtime/test_terms.py -k padding",
    ),
    Mutation(
        "an 8-bit wire hides what is not finite",
        "runtime/terms.py",
        "jnp.where(jnp.all(jnp.isfinite(blocks), axis=2), largest / 127, jnp.nan)",
        "largest / 127",
        "runtime/test_terms.py -k finite",
    ),
    # -- calls, checkpoints, arguments ----------------------------------------------------------------------------
    Mutation(
        "one array donated twice",
        "runtime/call_cache.py",
        "len(set(map(id, leaves))) == len(leaves)",
        "True",
        "runtime/test_call_cache.py test_api.py -k 'twice or mistaken or same'",
    ),
    Mutation(
        "changed bytes go unseen",
        "checkpoint/manifest.py",
        "if digest != entries[name][1]:",
        "if False:",
        "checkpoint -k broken",
    ),
    Mutation(
        "the oldest checkpoint first",
        "checkpoint/directories.py",
        "_local(root), key=_order, reverse=True)",
        "_local(root), key=_order)",
        "checkpoint -k newest",
    ),
    Mutation(
        "any dtype fits a leaf",
        "checkpoint/matching.py",
        "and stored.dtype == wanted.stored.dtype",
        "",
        "checkpoint -k 'fit or dtype or other'",
    ),
    Mutation(
        "leaves of another size are examples",
        "capture/batch.py",
        "for i, dim, size in sized if size == examples}",
        "for i, dim, size in sized}",
        "test_per_replica.py -k another_size",
    ),
    Mutation(
        "a key is an example",
        "capture/batch.py",
        "if any(i in state or is_key(call.leaves[i]) for i in leaves):",
        "if any(i in state for i in leaves):",
        "test_per_replica.py -k two_words",
    ),
]


def where(mutation: Mutation) -> Path:
    """The file, below the root, in which the old text stands."""
    place = ROOT / PACKAGE / mutation.folder
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    if missing := [f for f in files if not f.is_file()]:
        raise Broken(f"{mutation.name}: there is no {missing[0].relative_to(ROOT)}")
    found = [file for file in files for _ in range(file.read_text().count(mutation.old))]
    if len(found) != 1:
        raise Broken(f"{mutation.name}: {mutation.old!r} stands {len(found)} times in {PACKAGE / mutation.folder}")
    return found[0].relative_to(ROOT)


def selection(tests: str, name: str) -> list[str]:
    paths, _, expression = tests.partition(" -k ")
    selected = [str(ROOT / "tests" / path) for path in paths.split()]
    if missing := [path for path in selected if not Path(path).exists()]:
        raise Broken(f"{name}: there is no {missing[0]}")
    return [*selected, *(["-k", expression.strip("'")] if expression else [])]


def run(source: Path, tests: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    chosen = ["-m", "not thorough", *tests]
    return subprocess.run([*command, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True)


PASSED: set[str] = set()  # selections that were seen to pass without a mutation


def baseline(mutation: Mutation) -> None:
    """The tests that should notice must pass on the code as it is. Each selection is run once."""
    if mutation.tests in PASSED:
        return
    done = run(ROOT / "src", selection(mutation.tests, mutation.name))
    if done.returncode != 0:
        fails = f"{mutation.tests} fails without the mutation"
        raise Broken(f"{mutation.name}: {fails}\n{done.stdout[-800:]}{done.stderr[-800:]}")
    PASSED.add(mutation.tests)


def survives(mutation: Mutation) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src")
        file = copy / where(mutation)
        text = file.read_text().replace(mutation.old, mutation.new)
        compile(text, str(file), "exec")
        file.write_text(text)
        done = run(copy / "src", selection(mutation.tests, mutation.name))
    if done.returncode > 1:  # not a crash: whoever breaks the interpreter is noticed
        raise Broken(f"{mutation.name}: pytest ended with {done.returncode}\n{done.stdout[-800:]}{done.stderr[-800:]}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(w in m.name for w in options.words)]
    for mutation in chosen:  # all of them before the first is tried
        file, _ = where(mutation), selection(mutation.tests, mutation.name)
        if options.list:
            print(f"{file}: {mutation.name}")
    if options.list:
        return 0
    survivors = []
    for number, mutation in enumerate(chosen, 1):
        start = time.time()
        baseline(mutation)
        survived = survives(mutation)
        survivors += [mutation] * survived
        verdict = "SURVIVED" if survived else "caught"
        print(f"{number:3}/{len(chosen)}  {verdict:8}  {time.time() - start:5.0f} s  {mutation.name}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(f"mutations.py: {error}")
