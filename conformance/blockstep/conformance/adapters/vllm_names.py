"""What the adapter of vLLM can say without vLLM: its releases, and what a digest stands for."""

from __future__ import annotations

from importlib import metadata

from blockstep.spec.vocabulary import BlockKey, Request, TokenIds

RELEASES: tuple[str, ...] = ("0.19.1",)
"""Releases that the adapter was written against and run with; arguments and fields drift."""
ADAPTER_PREFIX = "adapter:"


def get_release_problem(version: str | None) -> str | None:
    """Why this version of vLLM cannot be held to the spec; None if it can. None: not installed.

    A local part (`0.19.1+cpu`) says how it was built, and is ignored.
    """
    if version is not None and version.split("+")[0] in RELEASES:
        return None
    found = "vLLM is not installed" if version is None else f"vLLM {version} is not supported"
    return (
        f"{found}; the adapter follows {' and '.join(RELEASES)}: "
        f"`make vllm VLLM={RELEASES[-1]}` installs it beside .venv and runs the check there"
    )


def get_installed_version() -> str | None:
    """The version of vLLM in this environment, or None. Does not import it, which takes seconds."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def require_release(error: ImportError | None = None) -> None:
    """Raise what a user can act on if vLLM is missing, of another release, or broken.

    Args:
        error: What importing it raised, if anything.

    Raises:
        ImportError: in one sentence; `load_engine` hands it on.
    """
    version = get_installed_version()
    problem = get_release_problem(version)
    if problem is None and error is not None:
        problem = (
            f"vLLM {version} is installed but cannot be imported ({error}): "
            "`make vllm` makes an environment with what its scheduler needs"
        )
    if problem is not None:
        raise ImportError(problem) from error


def get_lora_name(adapter: str, separate_names: bool) -> str:
    """The LoRA name that stands for `adapter`: prefixed if names are to be kept from salts."""
    return ADAPTER_PREFIX + adapter if separate_names else adapter


def compute_block_key(
    request: Request,
    parent: BlockKey | None,
    token_ids: TokenIds,
    start: int,
    is_after_output: bool,
) -> BlockKey:
    """What the digest of one full block stands for.

        prompt    |------------------------------|
        items         |--- a ---|   |--- b ---|
        blocks    |  [(a,2)]  | [(a,-6),(b,2)] | ...       offsets count from the block's start

    Once the request has output, 0.19.1 looks at its last item alone
    (`_gen_mm_extra_hash_keys` with `start_mm_idx` -1), so that is what the digest names.
    Source: `generate_block_hash_extra_keys`.

    Args:
        request: As it was submitted.
        parent: The key of the block before; None for the first.
        token_ids: The tokens of this block, exactly block-size many.
        start: Position of its first token.
        is_after_output: Whether it was hashed when the request had output already.
    """
    end = start + len(token_ids)
    items = request.items[-1:] if is_after_output else request.items
    return BlockKey(
        parent,
        token_ids,
        adapter=request.adapter,
        cache_salt=request.cache_salt if parent is None else None,
        items=tuple(
            (item.identifier, item.offset - start)
            for item in items
            if item.offset < end and start < item.offset + item.length
        ),
    )
