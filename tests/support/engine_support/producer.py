"""A process that computes prompts into a store, and waits for a line in the middle.

python -m engine_support.producer FOLDER SOCKET < lines
<- prompts        as JSON
-> announced      all prompts are announced
-> half           half of the prompts are saved; the process waits for a line
-> all
"""

from __future__ import annotations

import json
import sys

from blockstep.impl.engine import LLM, RemoteStore, SamplingParams


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(folder: str, path: str) -> None:
    """Compute all prompts, as a process of its own."""
    store = RemoteStore(path)
    llm = LLM(
        folder, kv_store=store, kv_role="kv_producer", block_size=4, num_blocks=120,
        max_num_seqs=8, max_num_batched_tokens=64,
    )  # fmt: skip
    prompts, params = json.loads(sys.stdin.readline()), SamplingParams(max_tokens=1)
    left = [llm.add_request(prompt, params) for prompt in prompts]
    print_line("announced")
    for count, announcement in ((len(prompts) // 2, "half"), (0, "all")):
        while len(left) > count:
            llm.step()
            left = [name for name in left if llm.is_live(name) or llm._is_saving(name)]
        print_line(announcement)
        sys.stdin.readline()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
