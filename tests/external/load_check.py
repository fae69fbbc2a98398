"""Ask coremltools' own loader whether packages are valid, and check what it does not look at.

usage: python load_check.py PACKAGE...        (needs coremltools 9; reads copies, never the packages themselves)

Prints `ok PACKAGE` or `bad PACKAGE: reason` for each and exits with 1 when any is bad.
"""

import logging
import os
import re
import shutil
import struct
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import coremltools as ct
from coremltools.converters.mil.frontend.milproto import load as milproto

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_@]*\Z")

# MIL data type -> (blob data type, bits per element)
BLOB_TYPES = {
    10: (1, 16), 11: (2, 32), 31: (3, 8), 21: (4, 8), 13: (5, 16), 22: (6, 16), 32: (7, 16), 25: (8, 4), 37: (9, 1),
    36: (10, 2), 35: (11, 4), 39: (12, 3), 38: (13, 6), 23: (14, 32), 33: (15, 32), 40: (16, 8), 41: (17, 8),
}


def values(block):
    """Every constant of a block, nested blocks included."""
    for op in block.operations:
        yield from op.attributes.values()
        for argument in op.inputs.values():
            for binding in argument.arguments:
                if binding.WhichOneof("binding") == "value":
                    yield binding.value
        for inner in op.blocks:
            yield from values(inner)


def check_blobs(block, weights, problems):
    for value in values(block):
        if value.WhichOneof("value") != "blobFileValue":
            continue
        blob = value.blobFileValue
        where = f"blob {blob.fileName}:{blob.offset}"
        if not blob.fileName.startswith("@model_path/"):
            problems.append(f"{where} is outside @model_path")
        try:
            with open(os.path.join(weights, os.path.basename(blob.fileName)), "rb") as f:
                data = f.read()
        except OSError as e:
            problems.append(f"{where}: {e}")
            continue
        if blob.offset % 64 or blob.offset + 64 > len(data):
            problems.append(f"{where} is misaligned or past the end")
            continue
        sentinel, dtype, size, start, padding = struct.unpack_from("<IIQQQ", data, blob.offset)
        tensor = value.type.tensorType
        count = 1
        for d in tensor.dimensions:
            count *= d.constant.size
        want, bits = BLOB_TYPES.get(tensor.dataType, (None, 8))
        if sentinel != 0xDEADBEEF or dtype != want:
            problems.append(f"{where} has no record of type {want}")
        elif size != (count * bits + 7) // 8 or start + size > len(data) or start % 64:
            problems.append(f"{where} does not hold {count} elements of {bits} bits")
        elif bits < 8 and padding != size * 8 - count * bits:
            problems.append(f"{where} records {padding} padding bits")


def check_interface(spec, problems):
    described = {f.name: f for f in spec.description.functions} or {"main": spec.description}
    if set(described) != set(spec.mlProgram.functions):
        problems.append(f"described functions {sorted(described)}, program has {sorted(spec.mlProgram.functions)}")
    for name, function in spec.mlProgram.functions.items():
        if name not in described:
            continue
        features = {f.name: f for f in [*described[name].input, *described[name].state]}
        if set(features) != {i.name for i in function.inputs}:
            problems.append(f"{name}: inputs and their description differ")
        for i in function.inputs:
            state = i.type.WhichOneof("type") == "stateType"
            if i.name in features and state != (features[i.name].type.WhichOneof("Type") == "stateType"):
                problems.append(f"{name}: {i.name} is a state on one side only")
        block = function.block_specializations[function.opset]
        if sorted(block.outputs) != sorted(o.name for o in described[name].output):
            problems.append(f"{name}: outputs and their description differ")


def check_names(block, seen, problems):
    for op in block.operations:
        for inner in op.blocks:
            check_names(inner, seen | {i.name for i in inner.inputs}, problems)
        for out in op.outputs:
            if not IDENTIFIER.match(out.name):
                problems.append(f"{out.name!r} is not an identifier")
            if out.name in seen:
                problems.append(f"{out.name} is defined twice")
            seen.add(out.name)


def check_types(function, loaded, problems):
    """Stored shapes against those that coremltools infers; the loader tolerates more."""
    stored = {}

    def collect(block):
        for op in block.operations:
            for out in op.outputs:
                stored[out.name] = out.type
            for inner in op.blocks:
                collect(inner)

    def compare(block):
        for op in block.operations:
            for v in op.outputs:
                t = stored.get(v.name)
                if t is None or t.WhichOneof("type") != "tensorType" or not hasattr(v, "shape"):
                    continue
                have = [d.constant.size if d.WhichOneof("dimension") == "constant" else None for d in t.tensorType.dimensions]
                want = [int(s) if str(s).lstrip("-").isdigit() else None for s in (v.shape or ())]
                if op.op_type == "tile" and op.reps.val is None:
                    # Nothing is inferred for repetitions that are computed; what is stored may say more.
                    have = [s and h for h, s in zip(have, want)]
                if have != want:
                    problems.append(f"{v.name}: stored shape {have}, inferred {want}")
            for inner in op.blocks:
                compare(inner)

    collect(function.block_specializations[function.opset])
    compare(loaded)


def check(package):
    with tempfile.TemporaryDirectory() as tmp:
        copy = os.path.join(tmp, "copy.mlpackage")
        shutil.copytree(package, copy)
        model = ct.models.MLModel(copy, skip_model_load=True)
        spec, weights = model.get_spec(), model.weights_dir or ""
        program = milproto.load(spec, specification_version=spec.specificationVersion, file_weights_dir=weights)
        problems = []
        check_interface(spec, problems)
        for name, function in spec.mlProgram.functions.items():
            block = function.block_specializations[function.opset]
            check_names(block, {i.name for i in function.inputs}, problems)
            check_blobs(block, weights, problems)
            check_types(function, program.functions[name], problems)
        return problems


def main():
    bad = False
    for package in sys.argv[1:]:
        try:
            problems = check(package)
        except Exception as e:  # the loader raises what it likes
            problems = [f"the loader refused: {type(e).__name__}: {e}"]
        bad |= bool(problems)
        print(f"bad {package}: {'; '.join(problems[:5])}" if problems else f"ok {package}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
