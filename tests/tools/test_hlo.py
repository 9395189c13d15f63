"""The reader of compiled programs that benchmarks and tests count collectives with."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shardstep._src.tools.hlo import collectives, counts, inside_loops, instructions, overlap, wire_bytes

TPU = """HloModule jit_step, is_scheduled=true, num_partitions=16
%all-reduce-scatter.1 (p: f32[2048,128]) -> f32[512,128] {
  %all-reduce.1 = f32[2048,128]{1,0:T(8,128)S(1)} all-reduce(%p), replica_groups=[4,4]<=[16], to_apply=%add
  ROOT %dynamic-slice = f32[512,128]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %i, %z)
}
ENTRY %main (p: f32[8,128]) -> f32[64,128] {
  %f = f32[512,128]{1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %s = (f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)S(1)}) all-gather-start(%p), replica_groups=[2,8]<=[16]
  %d = f32[64,128]{1,0:T(8,128)} all-gather-done(%s)
  %t = ((f32[8]{0}, bf16[4]{0:T(1024)(128)(2,1)}), (f32[64]{0}, bf16[32]{0})) all-gather-start(%d), replica_groups={}
  %r = ((f32[128]{0}), f32[8]{0}, u32[]) reduce-scatter-start(%x), replica_groups={}, to_apply=%add
  ROOT %c = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}
}
"""


def test_reads_what_the_tpu_compiler_prints():
    found = [(c.kind, c.dtype, c.bytes, c.group, c.arrays) for c in collectives(TPU)]
    assert found == [
        ("reduce-scatter", "f32", 2048 * 128 * 4, 4, 1),
        ("all-gather", "f32", 64 * 128 * 4, 8, 1),
        ("all-gather", "f32", 64 * 4 + 32 * 2, 16, 2),
        ("reduce-scatter", "f32", 128 * 4, 16, 1),
        ("collective-permute", "f32", 8 * 4, 16, 1),
    ]


GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8
%async_computation (p: f32[64]) -> f32[8] {
  ROOT %reduce-scatter.9 = f32[8]{0} reduce-scatter(%p), replica_groups={}, to_apply=%add
}
%body (t: (f32[8], f32[64])) -> (f32[8], f32[64]) {
  %ag = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups={}
  %gemm = (f32[64]{0}, s8[9]{0}) custom-call(%y, %z), custom_call_target="__cublas$gemm"
  %agd = f32[64]{0} all-gather-done(%ag)
  ROOT %r = (f32[8], f32[64]) tuple(%x, %agd)
}
ENTRY %main (p: f32[8]) -> f32[64] {
  %w = (f32[8], f32[64]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %rs = ((f32[64]{0}), f32[8]{0}) async-start(%g), calls=%async_computation
  %sync = (f32[8]{0}, f32[64]{0}) all-gather-start(%p), replica_groups={}
  %bitcast.1 = f32[8]{0} bitcast(%p)
  %syncd = f32[64]{0} all-gather-done(%sync)
  %loss = f32[] all-reduce(%l), replica_groups={}, to_apply=%add
  %update = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
  %rsd = f32[8]{0} async-done(%rs)
  ROOT %o = f32[64]{0} copy(%syncd)
}
"""


def test_what_is_sent_while_other_work_is_done():
    """A product inside the loop hides the gather there; nothing stands between the start and the end of the other."""
    gather, scatter = 256 * 7 / 8, 256 * 7 / 8
    assert overlap(collectives(GPU)) == {
        "reduce-scatter": (scatter, scatter),
        "all-gather": (3 * gather, 4 * gather),
        "all-reduce": (0.0, pytest.approx(2 * 4 * 7 / 8)),
    }


def test_a_collective_is_no_work_to_hide_another_behind():
    """The TPU's scatters are fusions. One between the start and the end of a gather hides nothing."""
    first = next(line for line in TPU.splitlines() if line.startswith("  %f = "))
    start = next(line for line in TPU.splitlines() if line.startswith("  %s = "))
    text = TPU.replace(f"{first}\n{start}", f"{start}\n{first}")
    assert text != TPU and not any(c.overlapped for c in collectives(text))
    assert any(c.overlapped for c in collectives(text.replace("calls=%all-reduce-scatter.1", "calls=%product")))


def test_one_iteration_is_what_the_loops_repeat():
    """Of a training loop: once what its body sends, without what stands before and after it."""
    (gather,) = collectives(inside_loops(GPU))
    assert (gather.kind, gather.bytes, gather.group, gather.times) == ("all-gather", 256, 8, 1)


def compiled(fun, mesh, *args):
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return collectives(jax.jit(sharded).lower(*args).compile().as_text())


@pytest.mark.parametrize(
    ("fun", "kind", "size", "wire"),
    [
        (lambda x: jax.lax.psum(x, "data"), "all-reduce", 1024, 2 * 7 / 8),
        (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), "reduce-scatter", 1024, 7 / 8),
        (lambda x: jax.lax.all_gather(x, "data", tiled=True), "all-gather", 8 * 1024, 7 / 8),
        (lambda x: jax.lax.all_to_all(x.reshape(8, -1), "data", 0, 1), "all-to-all", 1024, 7 / 8),
        (lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]), "collective-permute", 1024, 1),
    ],
)
def test_counts_each_kind_of_collective(fun, kind, size, wire, mesh):
    (found,) = compiled(fun, mesh, jnp.ones((8 * 16, 16)))
    assert (found.kind, found.dtype, found.bytes, found.group, found.in_loop) == (kind, "f32", size, 8, False)
    assert found.wire_bytes == pytest.approx(wire * size)


def test_a_fused_collective_is_one_record_with_the_bytes_of_all(mesh):
    found = compiled(lambda x: (jax.lax.psum(x, "data"), jax.lax.psum(x[:8] * 2, "data")), mesh, jnp.ones((128, 16)))
    assert counts(found) == {"all-reduce": 1}
    assert found[0].arrays == 2
    assert wire_bytes(found) == pytest.approx(2 * 7 / 8 * (1024 + 512))


def test_knows_what_is_inside_a_loop(mesh):
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.psum(jnp.tanh(y), "data"), jax.lax.psum(x, "data"))

    assert sorted(c.in_loop for c in compiled(step, mesh, jnp.ones((128, 16)))) == [False, True]


@pytest.mark.parametrize(("axes", "group"), [("data", 2), ("chip", 4), (("data", "chip"), 8)])
def test_reads_the_group_of_one_mesh_axis(axes, group):
    mesh = jax.make_mesh((2, 4), ("data", "chip"), axis_types=(AxisType.Auto,) * 2)
    (found,) = compiled(lambda x: jax.lax.psum(x, axes), mesh, jnp.ones((128, 16)))
    assert found.group == group


def test_an_all_reduce_is_counted_once_in_either_form_of_its_start():
    """Older compilers name the results alone, newer ones the operands before them."""
    forms = (
        "%r = f32[64]{0} all-reduce-start(%p)",
        "%r = (f32[64]{0}, bf16[32]{0}) all-reduce-start(%p, %q)",
        "%r = ((f32[64]{0}), f32[64]{0}) all-reduce-start(%p)",
        "%r = ((f32[64]{0}, bf16[32]{0}), (f32[64]{0}, bf16[32]{0})) all-reduce-start(%p, %q)",
    )
    sizes = [
        collectives(f"HloModule m, num_partitions=4\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {form}\n}}\n")[0].bytes
        for form in forms
    ]
    assert sizes == [256, 320, 256, 320]


def test_what_a_loop_sends_counts_as_often_as_the_loop_turns():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def outer(x):
        def inner(y, _):
            return jax.lax.psum(y, "data") / 8, None

        return jax.lax.scan(lambda y, _: jax.lax.scan(inner, y, None, length=5), x, None, length=3)[0]

    step = jax.jit(jax.shard_map(outer, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    found = collectives(step.lower(jnp.ones((16, 16))).compile().as_text())
    assert [c.times for c in found] == [15]
    assert wire_bytes(found) == 15 * 2 * 7 / 8 * 16 * 16 * 4


def tpu_loop(test):
    """The TPU's compiler does not print how often a loop turns."""
    return f"""HloModule m, num_partitions=4
%c (t: (s32[], f32[8])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(24)
  %t = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] {test}
}}
%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %x = f32[8] parameter(0)
  ROOT %g = f32[8] all-reduce(%x), replica_groups={{{{0,1,2,3}}}}
}}
ENTRY %main (x: f32[8]) -> f32[8] {{
  %w = (s32[], f32[8]) while(%x), condition=%c, body=%body
}}
"""


@pytest.mark.parametrize(
    ("test", "times"),
    [("compare(%i, %limit), direction=LT", 24), ("compare(%i, %i), direction=LT", 1), ("and(%i, %limit)", 1)],
)
def test_a_loop_turns_as_often_as_its_counter_is_allowed_to(test, times):
    text = tpu_loop(test)
    (found,) = collectives(text)
    assert found.times == times
    assert dict(instructions(text))["ROOT %g = f32[8] all-reduce(%x), replica_groups={{0,1,2,3}}"] == times
