"""Generates the Python code of the contract and its descriptor image.

    python tools/gen_protos.py            # writes protos/**/*_pb2* and protos/omni.binpb
    python tools/gen_protos.py --check    # exit status 1 when what is committed differs

The contract uses files that other projects own: ``google/rpc/*.proto``, whose source is in the
googleapis-common-protos wheel, and ``buf/validate/validate.proto``, whose descriptor is in the protovalidate wheel.
So none is copied into this repository, and nothing is downloaded. ``protos/omni.binpb`` is the contract with all
that it uses, comments included: the input of ``buf``, and of clients in languages whose tools want one file.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from google.protobuf import descriptor_pb2
from google.rpc import status_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
IMAGE = PROTOS / "omni.binpb"
VALIDATE = "buf/validate/validate.proto"
DETAILS = "google/rpc/error_details.proto"
"""Not imported by the contract, but what the details of its ``google.rpc.Status`` are made of."""


def validate_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of ``buf/validate/validate.proto``, as the installed protovalidate was built with it."""
    from protovalidate._gen.buf.validate import validate_pb

    return descriptor_pb2.FileDescriptorProto.FromString(validate_pb.desc().proto.to_binary())


def run(arguments: list[str]) -> None:
    """Runs protoc.

    Raises:
        SystemExit: when it reports an error; it has then printed it.
    """
    if status := protoc.main(["protoc", *arguments]):
        raise SystemExit(status)


def generate(out: Path) -> None:
    """Writes all generated files below `out`, in the layout of ``protos/``."""
    googleapis = Path(status_pb2.__file__).parent.parent.parent
    wellknown = Path(grpc_tools.__file__).parent / "_proto"
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("omni/v1/*.proto"))
    services = [name for name in sources if re.search(r"^service ", (PROTOS / name).read_text(), re.MULTILINE)]
    with tempfile.TemporaryDirectory() as scratch:
        # protoc takes imports from sources or from descriptors, not from both: everything is first made a descriptor.
        imports = Path(scratch) / "imports.binpb"
        run(
            [
                f"-I{googleapis}",
                f"-I{wellknown}",
                "--include_imports",
                f"--descriptor_set_out={imports}",
                "google/rpc/status.proto",
                DETAILS,
                "google/protobuf/descriptor.proto",
                "google/protobuf/duration.proto",
                "google/protobuf/field_mask.proto",
                "google/protobuf/struct.proto",
                "google/protobuf/timestamp.proto",
            ]
        )
        known = descriptor_pb2.FileDescriptorSet.FromString(imports.read_bytes())
        known.file.append(validate_descriptor())
        imports.write_bytes(known.SerializeToString(deterministic=True))
        common = [f"--descriptor_set_in={imports}", f"-I{PROTOS}"]
        run([*common, f"--python_out={out}", f"--mypy_out=quiet:{out}", *sources, VALIDATE])
        run([*common, f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}", *services])
        run(
            [
                *common,
                "--include_imports",
                "--include_source_info",
                f"--descriptor_set_out={out / IMAGE.name}",
                *sources,
                DETAILS,
            ]
        )


def generated(root: Path) -> dict[str, bytes]:
    """The generated files below `root`, by relative path."""
    files = [root / IMAGE.name, *root.glob("omni/v1/*_pb2*.py*"), *root.glob("buf/validate/*_pb2*.py*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = generated(Path(scratch)), generated(PROTOS)
        if check:
            stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
            if stale:
                sys.exit(f"generated code is not up to date, run `make protos`: {', '.join(stale)}")
            return
        for name in committed.keys() - fresh.keys():
            (PROTOS / name).unlink()
        for name, content in fresh.items():
            (PROTOS / name).parent.mkdir(parents=True, exist_ok=True)
            (PROTOS / name).write_bytes(content)


if __name__ == "__main__":
    main()
