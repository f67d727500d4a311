"""Continue prompts with a trained model: ``ironfn generate``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("generate")
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("-p", "--prompt", "prompts", multiple=True, help="Text to continue; give it again for more.")
@click.option("-n", "--tokens", default=128, show_default=True, type=click.IntRange(1), help="New tokens a prompt.")
@click.option("-t", "--temperature", default=0.8, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("-k", "--top-k", default=50, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, type=int)
def command(run: Path, prompts: tuple[str, ...], tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Continue prompts with the model of a run directory or a checkpoint.

    Without -p it continues the prompts that the run's spec names, or begins a text of its own.
    """
    from ironfn.generate.sampling import continuation, greedy, sampler

    from .trained import open_model, require_text

    model = open_model(run, lambda line: click.echo(line, err=True))
    for number, prompt in enumerate(prompts or model.prompts or ("",)):
        require_text(prompt, "the prompt")
        ids = model.encode(prompt)
        choose = greedy if temperature == 0 else sampler(temperature, top_k, seed, number)
        new = continuation(model.params, model.arch, ids, tokens, choose, stop=model.stop, how=model.how)
        click.secho(prompt, bold=True, nl=False)
        click.echo(model.tokenizer.decode(list(new)))
        click.echo()
