"""A small training as a process of its own: `python -m tests.pipeline.train_small RUN_DIR`.

With DRAFTMESH_PROCESSES set it is one of several, with 4 host devices each.
"""

import dataclasses
import os
import sys

PROCESSES = int(os.environ.get("DRAFTMESH_PROCESSES", "1"))
DEVICES = 4 if PROCESSES > 1 else 1
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

from drafters.mesh import Topology  # noqa: E402 after the environment is set
from drafters.shapes import TransformerShape  # noqa: E402
from pipeline.core.errors import run_cli  # noqa: E402
from pipeline.train import train  # noqa: E402
from pipeline.training_settings import Batch, Checkpoints, Cluster, ModelSpec, Watch  # noqa: E402
from tests.pipeline.synthetic import VOCAB, SyntheticText  # noqa: E402

STEPS = 40

SHAPE = TransformerShape(
    vocab_size=VOCAB,
    num_layers=1,
    width=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    mlp_width=32,
    context=32,
)


TARGET = ModelSpec(name="target", shape=SHAPE, steps=STEPS, batch=Batch(rows=8, length=16))
# Begins with what the process that leads has just written.
NEXT = dataclasses.replace(TARGET, name="next", steps=2, init="model", start="target")


def main() -> None:
    several = PROCESSES > 1
    train(
        run_dir=sys.argv[1],
        models=(TARGET, NEXT) if several else (TARGET,),
        text=SyntheticText(pause_s=0.05),
        topology=Topology(
            name="test",
            platform="cpu",
            axes=("data", "model"),
            sizes=(4, 2) if several else (1, 1),
        ),
        model_axes=("model",) if several else (),
        cluster=Cluster(launcher="explicit" if several else "none", timeout_s=120),
        checkpoints=Checkpoints(every_steps=6),
        watch=Watch(log_every=1, evaluate_every=STEPS, evaluate_batches=1),
    )


if __name__ == "__main__":
    sys.exit(run_cli(main))
