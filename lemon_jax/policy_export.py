"""A trained policy in the hub's layout, for `lemon export --format hub`."""

from __future__ import annotations

from pathlib import Path

from .errors import LemonError
from .model.hub_save import save_pretrained
from .orchestrator import MANIFEST_FILE, Orchestrator


def export_policy(source: Path, out: Path) -> Path:
    """Write the policy of a run directory, or of a policy folder, as OUT, which must be empty or absent.

    Parameters are written in fp32. A tool that samples from OUT has to ask as the policy was asked (see
    `policy_prompt`): the bare task and its separator, or the explanation of the language and the task in the
    chat template, which is written too. Raises `LemonError` where there is no policy, or OUT holds files.
    """
    folder = source / "policy" if (source / "policy").is_dir() else source
    if not (folder / MANIFEST_FILE).exists():
        raise LemonError(f"{source}: holds no trained policy; name a run that ended or a policy folder")
    policy = Orchestrator.load(folder)
    save_pretrained(
        out,
        policy.decoder,
        policy.config,
        policy.tokenizer,
        max_positions=policy.max_prompt + policy.max_new,
        chat_template=policy.chat.template if policy.chat else None,
    )
    return out
