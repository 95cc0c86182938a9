"""``omnid``: starts clusters and coordinators, asks them, and shows how they do."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnid import options
from omnid.ending import listening, plain_errors, unless_stopped, until_stopped
from omnid.saving import save, writable_folder

if TYPE_CHECKING:
    from omni.rpc.tls import ClientTls

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
config_app = typer.Typer(no_args_is_help=True, help="Looks at deployments without starting them.")
app.add_typer(config_app, name="config")

Deploy = Annotated[str, typer.Argument(help="name of a shipped deployment, or path of a YAML file")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="PATH=VALUE", help="overrides one value, models.NAME.stages.STAGE.KEY=VALUE"),
]


Target = Annotated[
    str, typer.Option("--target", "-t", metavar="HOST:PORT", help="the coordinator", callback=options.address)
]
GrpcListen = Annotated[
    str | None, typer.Option("--grpc", metavar="HOST:PORT", help="instead of listen.grpc", callback=options.address)
]
HttpListen = Annotated[
    str | None, typer.Option("--http", metavar="HOST:PORT", help="instead of listen.http", callback=options.address)
]
ReadyFd = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="writes the bound addresses there as JSON when ready", callback=options.writable_descriptor
    ),
]
TlsFrom = Annotated[str | None, typer.Option("--tls-from", metavar="DEPLOY", help="deployment whose TLS files to use")]
LogFormat = Annotated[str, typer.Option(help="console or json", callback=options.log_format)]
LogLevel = Annotated[str, typer.Option(help="least level that is shown", callback=options.log_level)]
DEFAULT_TARGET = "127.0.0.1:7070"


def _run(work: Coroutine[Any, Any, None]) -> None:
    import uvloop

    uvloop.run(work)


def _configure_logs(log_format: str, level: str) -> None:
    from omni.rpc import logs, tracing

    logs.configure("json" if log_format == "json" else "console", level)
    tracing.configure("omnid")


@app.command()
def up(
    deploy: Deploy,
    overrides: Set = None,
    grpc: GrpcListen = None,
    http: HttpListen = None,
    ready_timeout: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="seconds until a replica of every stage must serve")
    ] = 600.0,
    ready_fd: ReadyFd = None,
    log_format: LogFormat = "console",
    log_level: LogLevel = "INFO",
) -> None:
    """Starts a whole cluster on this host, gateway included, and keeps it alive."""
    from omni.rpc import logs
    from omnid.launcher.deployment import prepare
    from omnid.launcher.local import local_cluster

    _configure_logs(log_format, log_level)
    with plain_errors():
        config, pipelines = prepare(deploy, overrides or ())
        tls = config.tls_files()

        async def serve() -> None:
            stopped = asyncio.ensure_future(until_stopped())
            async with local_cluster(
                pipelines,
                grpc=grpc or config.listen.grpc,
                http=http or config.listen.http,
                metrics=config.listen.metrics,
                tls=tls,
                logs=("--log-format", log_format, "--log-level", log_level),
            ) as cluster:
                for command in cluster.waits_for:
                    logs.say(f"waiting for another host to run: {command}")
                ready = asyncio.ensure_future(cluster.ready(ready_timeout))
                await asyncio.wait((stopped, ready), return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    ready.cancel()
                    return
                await ready
                _announce(ready_fd, {"grpc": cluster.grpc, "http": cluster.http, "metrics": cluster.metrics})
                logs.say(f"ready: gRPC {cluster.grpc}" + (f", HTTP {cluster.http}" if cluster.http else ""))
                await stopped

        with listening(config, http=http, grpc=grpc, metrics=None):
            _run(serve())


@app.command()
def serve(
    deploy: Deploy,
    overrides: Set = None,
    grpc: GrpcListen = None,
    ready_fd: ReadyFd = None,
    log_format: LogFormat = "console",
    log_level: LogLevel = "INFO",
) -> None:
    """Starts a coordinator alone; stage servers and gateways join it from wherever they run."""
    from omnid.config import load_deploy, override, resolve
    from omnid.daemon import Daemon

    _configure_logs(log_format, log_level)
    with plain_errors():
        config = override(load_deploy(deploy), overrides or ())
        pipelines = resolve(config)

        tls = config.tls_files()

        async def run() -> None:
            daemon = Daemon(
                pipelines,
                listen=grpc or config.listen.grpc,
                tls=tls,
                metrics_listen=config.listen.metrics,
            )
            bound = await daemon.start()
            try:
                _announce(ready_fd, {"grpc": bound.grpc, "metrics": bound.metrics})
                await until_stopped()
            finally:
                await daemon.stop()

        with listening(config, grpc=grpc, metrics=None):
            _run(run())


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="name of a served model")],
    prompt: Annotated[str, typer.Argument(help="question or description")],
    target: Target = DEFAULT_TARGET,
    output: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", help="text, audio, image; repeatable", callback=options.modalities),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--save", help="folder for sound and pictures", callback=writable_folder)
    ] = Path("out"),
    tls_from: TlsFrom = None,
) -> None:
    """Asks a running cluster; text is printed as it comes, files are saved."""
    from omni.rpc.text import MODALITIES
    from omnid.client.asynchronous import AsyncOmni
    from omnid.client.types import Generation

    async def ask() -> None:
        made = Generation()
        async with AsyncOmni(target, tls=_client_tls(tls_from)) as client:
            # Sound without a header is for programs; a file is to be played.
            spoken = [
                each.stage
                for served in await client.models()
                for each in served.outputs
                if served.model == model and each.modality == MODALITIES["audio"]
            ]
            params = {stage: {"format": "MEDIA_FORMAT_WAV"} for stage in spoken}
            try:
                async for each in client.stream(model, prompt, outputs=output or (), params=params, generation=made):
                    typer.echo(each.text, nl=False)
            finally:
                if made.text:
                    typer.echo()
        for index, artifact in enumerate(made.artifacts):
            kind = artifact.mime_type.partition("/")[2].partition(";")[0] or "bin"
            path = folder / f"{made.request_id}-{index}.{kind}"
            save(path, artifact.data)
            typer.echo(f"{artifact.modality}: {path}")

    with plain_errors():
        _run(unless_stopped(ask()))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the answers", callback=writable_folder)] = Path("out"),
    deploy: Annotated[str, typer.Option(help="a deployment that serves tiny-omni and tiny-image")] = "demo",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="shows what the processes say")] = False,
) -> None:
    """Starts a cluster, asks a question and for a picture, shows how long it took, and stops it."""
    from omnid.demo import run

    _configure_logs("console", "INFO" if verbose else "WARNING")
    with plain_errors():
        _run(unless_stopped(run(deploy, out, verbose=verbose)))


@app.command()
def ps(
    target: Target = DEFAULT_TARGET,
    data: Annotated[
        bool, typer.Option("--data", help="shows published tensors, their leases, and what was read")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="prints all that is known, as JSON")] = False,
    tls_from: TlsFrom = None,
) -> None:
    """Shows stages, replicas, their health and load."""
    import grpc
    from google.protobuf import json_format
    from rich.console import Console

    from omni.rpc.channel import make_channel
    from omni.rpc.errors import OmniError
    from omni.v1 import cluster_pb2, cluster_pb2_grpc
    from omnid import listing

    async def show() -> None:
        async with make_channel(target, tls=_client_tls(tls_from)) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            try:
                listed = await stub.ListReplicas(cluster_pb2.ListReplicasRequest(), timeout=5)
            except grpc.aio.AioRpcError as error:
                raise OmniError.from_rpc_error(error) from None
        if as_json:
            typer.echo(
                json_format.MessageToJson(
                    listed, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                )
            )
            return
        table = listing.data(listed.replicas) if data else listing.work(listed.replicas)
        Console(width=None if sys.stdout.isatty() else 160).print(table)

    with plain_errors():
        _run(show())


@app.command()
def pipelines() -> None:
    """Lists the pipelines and deployments that are shipped."""
    from omnid.config import load_pipeline, shipped_deploys, shipped_pipelines

    for name in shipped_pipelines():
        pipeline = load_pipeline(name)
        typer.echo(f"pipeline {name}: {' -> '.join(pipeline.stages)}")
    for name in shipped_deploys():
        typer.echo(f"deploy {name}")


@config_app.command("resolve")
def resolve_command(deploy: Deploy, overrides: Set = None) -> None:
    """Prints a deployment as the processes will see it, JSON."""
    from google.protobuf import json_format

    from omnid.config import load_deploy, override, resolve

    with plain_errors():
        for pipeline in resolve(override(load_deploy(deploy), overrides or ())):
            typer.echo(json_format.MessageToJson(pipeline, preserving_proto_field_name=True))


@config_app.command("validate")
def validate_command(deploy: Deploy, overrides: Set = None) -> None:
    """Checks a deployment; exit status 2 with what is wrong, and where. What other hosts or stage servers have to
    know is told as a warning or a note."""
    from omni.rpc import logs
    from omnid.config import absent_checkpoints, load_deploy, override, resolve, unread_arguments

    with plain_errors():
        config = override(load_deploy(deploy), overrides or ())
        resolved = resolve(config)
        config.tls_files()
        for problem in absent_checkpoints(config, resolved).values():
            logs.say(f"warning: {problem}")
        for problem in unread_arguments(config):
            logs.say(f"note: {problem}")
        typer.echo(f"{deploy}: {len(resolved)} model(s), {sum(len(each.stages) for each in resolved)} stages, good")


def _client_tls(deploy: str | None) -> ClientTls | None:
    from omnid.config import ConfigError, load_deploy

    if deploy is None:
        return None
    config = load_deploy(deploy)
    files = config.tls_files()
    if files is None:
        raise ConfigError([config.document.problem((), "has no tls, which --tls-from is to take files from")])
    return files.client()


def _announce(descriptor: int | None, addresses: dict[str, str]) -> None:
    """One JSON line for whoever started this process."""
    import json

    if descriptor is not None:
        os.write(descriptor, json.dumps(addresses).encode() + b"\n")
        os.close(descriptor)


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
