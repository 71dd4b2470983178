"""`jaxserve chat`: a conversation in the terminal."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, cast

import typer

from jaxserve.cli import options as opt
from jaxserve.core.errors import JaxserveError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator

    from jaxserve.cli.prompts import Message
    from jaxserve.engine.answers import Piece
    from jaxserve.runtime import Runtime

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


def chat(
    system: Annotated[
        str | None, typer.Option("--system", help="System message to start with.")
    ] = None,
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    policy: opt.Policy = "auto",
    load: opt.Load = "auto",
    dtype: opt.DType = None,
    kv_memory: opt.KvMemory = None,
    predictor: opt.Predictor = None,
    max_context: opt.MaxContext = None,
    tensor_parallel: opt.TensorParallel = 1,
    stages: opt.Stages = None,
    coordinator: opt.Coordinator = None,
    num_processes: opt.NumProcesses = None,
    process_id: opt.ProcessId = None,
    record: opt.Record = None,
    quiet: opt.Quiet = False,
) -> None:
    """Talk with an instruct model; answers appear as they are made.

    /reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer.
    """
    with opt.exit_codes():
        params = opt.sampling_params(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=tuple(stop or ()),
        )
        opt.join(coordinator, num_processes, process_id)
        with opt.open_runtime(
            model,
            policy=policy,
            load=load,
            dtype=dtype,
            kv_memory=kv_memory,
            predictor=predictor,
            max_context=max_context,
            tensor_parallel=tensor_parallel,
            stages=stages,
            max_slots=1,
            record=record,
            quiet=quiet,
        ) as rt:
            typer.echo(f"{model}: {HELP}", err=True)
            _converse(rt, params, system)


def _converse(rt: Runtime, params: SamplingParams, system: str | None) -> None:
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    history = list(start)
    while (said := _ask()) is not None:
        if said == "/reset":
            history = list(start)
            typer.echo("(a new conversation)", err=True)
        elif said.startswith("/"):
            typer.echo(f"unknown command {said}; {HELP}", err=True)
        elif said:
            history = _answer(rt, params, [*history, {"role": "user", "content": said}])


def _ask() -> str | None:
    """The next line that the user gives; None to leave."""
    try:
        said = input("> ").strip()
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo(f"\n{HELP}", err=True)
        return ""
    return None if said == "/exit" else said


def _answer(rt: Runtime, params: SamplingParams, history: list[Message]) -> list[Message]:
    """Print the answer as it comes; the history with it, or without the question if refused."""
    pieces: list[str] = []
    # Closing the generator is what cancels an answer that is still being made.
    stream = cast("Generator[Piece]", rt.stream(history, params))
    try:
        with closing(stream):
            for piece in stream:
                pieces.append(piece.text)
                typer.echo(piece.text, nl=False)
        typer.echo()
    except KeyboardInterrupt:
        typer.echo(" (stopped)")
    except JaxserveError as error:
        typer.echo(f"{opt.describe(error)} (/reset starts anew)", err=True)
        return history[:-1]
    return [*history, {"role": "assistant", "content": "".join(pieces)}]
