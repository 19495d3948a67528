"""Scales by way of their table: the same arena as by copies of their own, in a fraction of the copies."""

import pytest

from tests.support import checkpoints
from weightcache.arenas import host
from weightcache.crds import specs
from weightcache.daemon import checkpoints as checkpoint_files
from weightcache.daemon import plans, reads, scales

MIB = 1 << 20


def plan_of(path, rank, size, *, expert=False):
    layout = specs.Parallelism(tensor=size, expert=specs.Expert(enabled=expert))
    return plans.build_rank_plan(checkpoint_files.read(path), layout, rank)


def carry_out(path, plan, units, arena):
    """Read the units' bytes, put their segments, fill the table."""
    table = bytearray(4 * len(reads.scale_sources(plan)))
    for unit in units:
        with (path / unit.file).open("rb") as file:
            file.seek(unit.begin)
            data = file.read(unit.size_bytes)
        arena.put_all(memoryview(data), unit.segments)
        for part in unit.scales:
            table[part.table_offset : part.table_offset + part.size_bytes] = data[part.source_offset :][
                : part.size_bytes
            ]
    return table


@pytest.mark.parametrize(("size", "expert"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kv_scales", [False, True])
def test_scales_put_from_the_table_are_those_of_the_files(tmp_path, size, expert, kv_scales):
    """Every byte of the arena, for every rank, by both ways."""
    path = checkpoints.make_checkpoint(tmp_path, "qwen3_moe", "nvfp4", num_shards=2, kv_scales=kv_scales)
    for rank in range(size):
        plan = plan_of(path, rank, size, expert=expert)
        units = reads.build_reads(plan, 4 * MIB)
        one_by_one, by_table = host.HostArena.create(plan.arena_bytes), host.HostArena.create(plan.arena_bytes)
        carry_out(path, plan, units, one_by_one)
        scales.put(by_table, plan, carry_out(path, plan, scales.set_apart(units), by_table))
        assert bytes(by_table.buffer) == bytes(one_by_one.buffer)
        one_by_one.close()
        by_table.close()


def test_no_scale_is_copied_by_itself(tmp_path):
    """Eight experts in three layers have 144 scalars of their own; a table tensor is one run."""
    path = checkpoints.make_checkpoint(tmp_path, "qwen3_moe", "nvfp4")
    plan = plan_of(path, 0, 1)
    units = scales.set_apart(reads.build_reads(plan, 4 * MIB))
    assert min(segment.row_bytes for unit in units for segment in unit.segments) > 4
    runs = list(scales.runs(plan))
    assert len(runs) == sum(tensor.is_scale for tensor in plan.tensors) == 3 * 8
    assert sum(run.size_bytes for run in runs) == 4 * len(reads.scale_sources(plan))


def test_a_checkpoint_without_scales_has_no_table(tmp_path):
    """bf16: nothing set apart, nothing put."""
    plan = plan_of(checkpoints.make_checkpoint(tmp_path, "llama"), 0, 1)
    units = reads.build_reads(plan, 4 * MIB)
    assert scales.set_apart(units) == units and list(scales.runs(plan)) == []
