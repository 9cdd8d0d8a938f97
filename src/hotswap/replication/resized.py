"""A durable checkpoint of a job with another number of slots, laid out for one slot of this one.

Of slot *s*, if the checkpoint has *n* slots, slot *s mod n* is the predecessor. What slots hold parts of (DTensors) is put together from
all parts that overlap with this slot's. Everything else is the predecessor's: what all slots have alike (DDP's parameters, a
step counter), and what each has for itself (buffers, random generators). Generators of a slot that is not the first
successor of its predecessor are seeded anew from the predecessor's. Loaders, schedulers and the like must have been
in the same state on all slots: a position in the whole batch is one for any number of slots, a position in one slot's share is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from hotswap.errors import IntegrityError, LayoutMismatch, UsageError
from hotswap.integrations.ambient import apart
from hotswap.integrations.base import TensorSpec
from hotswap.replication import places, plaintree
from hotswap.replication.durable import load_header, load_tensors, verify
from hotswap.replication.durable_index import SlotRecord, manifest, slot_directory
from hotswap.replication.layout import Form, Row, lay_out_forms, views, write_header
from hotswap.replication.places import Part, Places

OF_EACH_SLOT = ("model", "random")
"""Parts of the state that may differ from slot to slot."""


def load_resized(
    directory: str | os.PathLike[str], step: int, slot: int, live: Mapping[str, TensorSpec]
) -> tuple[bytearray, int, int]:
    """What `durable.load` returns, for *slot* of a job with another number of slots; *live*: the forms of its tensors.

    UsageError if this state cannot be given to another number of slots, LayoutMismatch if it is of another program, IntegrityError if
    the checkpoint is not committed, incomplete or damaged.
    """
    directory = Path(directory)
    records = manifest(directory, step)
    kept = {old: _places(slot_directory(directory, step, old), record) for old, record in records.items()}
    _require_alike(kept)
    predecessor = slot % len(records)
    path = slot_directory(directory, step, predecessor)
    verify(path, records[predecessor])
    header = load_header(path, records[predecessor])
    forms = [_form(row, live) for row in header.rows]
    if slot >= len(records):
        header.objects["random"] = apart(header.objects["random"], slot)
    objects = plaintree.encode(header.objects)
    layout = lay_out_forms(forms, len(objects))
    memory = bytearray(layout.nbytes)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    unique = raw[layout.shared_nbytes :].numpy().data
    write_header(unique, layout, objects, slot=slot, generation=header.generation, step=step)
    found = views(raw, layout.rows, unique_start=layout.shared_nbytes, header_capacity=layout.header_capacity)
    targets = {row.name: (row.spec, view) for row, view in zip(layout.rows, found, strict=True)}
    load_tensors({name: view for name, (spec, view) in targets.items() if spec.place is None}, path)
    _put_together(
        {name: target for name, target in targets.items() if target[0].place is not None},
        directory,
        step,
        records,
        kept,
    )
    return memory, layout.shared_nbytes, layout.unique_nbytes


def _places(path: Path, record: SlotRecord) -> Places:
    if places.FILE not in record.files:
        raise IntegrityError(
            f"{path} does not say where its tensors lie: it can be loaded by as many slots as wrote it"
        )
    return places.read(path / places.FILE, record.files[places.FILE][1])


def _require_alike(kept: Mapping[int, Places]) -> None:
    first = next(iter(kept.values())).objects
    for name, digest in first.items():
        if name not in OF_EACH_SLOT and any(other.objects.get(name) != digest for other in kept.values()):
            raise UsageError(
                f"the state of {name} differs from slot to slot, so another number of slots cannot take it over: let its state_dict "
                "speak of the whole batch (steps or samples of all slots together), or leave --min-nodes out"
            )


def _form(row: Row, live: Mapping[str, TensorSpec]) -> Form:
    """What becomes of a tensor of the predecessor. The optimizer's state lies where its parameter does, before there is any."""
    spec = row.spec
    if spec.place is not None:
        owner = row.name.partition(".state.")[0] + ".param"
        here = live.get(row.name, live.get(owner))
        if here is None or here.place is None or here.place.whole != spec.place.whole:
            found = "not there" if here is None else "whole" if here.place is None else f"part of {here.place.whole}"
            raise LayoutMismatch(
                f"{row.name} is part of {spec.place.whole} in the checkpoint, and {found} in this process"
            )
        spec = replace(spec, shape=here.shape, place=here.place)
    return Form(name=row.name, spec=spec, shared=row.shared, volatile=row.volatile)


def _put_together(
    targets: Mapping[str, tuple[TensorSpec, torch.Tensor]],
    directory: Path,
    step: int,
    records: Mapping[int, SlotRecord],
    kept: Mapping[int, Places],
) -> None:
    """Fill each target from the slots that hold parts of it; equal parts, of slots that have the same, only once."""
    wanted = {name: _part(spec) for name, (spec, _) in targets.items()}
    taken: dict[str, set[Part]] = {name: set() for name in targets}
    for old, record in records.items():
        parts = kept[old].tensors
        names = [
            name
            for name, mine in wanted.items()
            if name in parts and parts[name] not in taken[name] and mine.overlap(parts[name]) is not None
        ]
        if not names:
            continue
        path = slot_directory(directory, step, old)
        verify(path, record)
        read = {name: torch.empty(parts[name].size, dtype=targets[name][0].dtype) for name in names}
        load_tensors(read, path)
        for name, tensor in read.items():
            box = wanted[name].overlap(parts[name])
            assert box is not None, f"{name} was chosen because it overlaps"
            targets[name][1][wanted[name].within(box)] = tensor[parts[name].within(box)]
            taken[name].add(parts[name])
    for name, mine in wanted.items():
        _require_covered(name, mine, taken[name])


def _part(spec: TensorSpec) -> Part:
    assert spec.place is not None, "only parts are put together"
    return Part(whole=spec.place.whole, offset=spec.place.offset, size=spec.shape)


def _require_covered(name: str, mine: Part, taken: set[Part]) -> None:
    """Different parts of one tensor do not overlap, so their sizes tell whether anything is missing."""
    boxes = [box for part in taken if (box := mine.overlap(part)) is not None]
    count = sum(prod(last - first for first, last in box) for box in boxes)
    if count != prod(mine.size):
        raise IntegrityError(f"the checkpoint has {count} of the {prod(mine.size)} elements of {name} that belong here")
