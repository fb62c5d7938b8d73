"""Constants of the Table 2 model, with their sources.

The paper names its workloads but gives neither speeds nor curves. A number here is therefore either
a public fact about the model (`source:`) or a plausible choice with a reason (`chosen:`). No number
was fitted to the results of schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# --- the cluster: 16 nodes of 4 V100 with 16 GB, EDR Infiniband (ONES section 4.1)

GPUS_PER_NODE: Final = 4
NODE_BYTES_PER_S: Final = 30e9  # ring all-reduce inside a node
NETWORK_BYTES_PER_S: Final = 7e9  # ring all-reduce across nodes
NODE_HOP_S: Final = 10e-6  # per step of a ring, which has 2 (c - 1) steps
NETWORK_HOP_S: Final = 30e-6

# --- constants of every job

COLD_START_S: Final = 20.0
RESTART_S: Final = (20.0, 40.0)  # start from a checkpoint with the smallest and the largest model
PREPARE_S: Final = 15.0
SWITCH_S: Final = 1.0
ABOVE_TARGET: Final = 10  # a job ends after so many epochs in a row above its target
SAFE_JUMP: Final = 2.0  # largest increase of the batch without loss, a factor
JUMP_EPOCHS: Final = 1.0  # epochs lost per doubling beyond `SAFE_JUMP`
EPOCHS_SPREAD: Final = 0.1  # sigma of the logarithm of a job's epochs to target
LOSS_LEFT: Final = 0.1  # share of the reducible loss that remains at the target
NOISE_SPREAD: Final = 0.1  # sigma of the logarithm of a measured noise scale
LOSS_SPREAD: Final = 0.02  # sigma of the logarithm of a loss
ERRATIC_SPREAD: Final = 0.15  # sigma of the logarithm of an erratic loss
SPIKES: Final = 0.06  # share of epochs in which an erratic loss has a spike
SPIKE: Final = (1.3, 2.5)  # range of the factor by which a spike raises the loss
PLATEAU: Final = 5  # epochs per plateau of an erratic loss
MAX_SLOTS: Final = 32  # per job
USER_SLOTS: Final = (1, 2, 4, 8)
USER_SHARES: Final = (0.4, 0.25, 0.25, 0.1)
CRASHES: Final = (0.05, 0.95)  # a script fails after a share of its work in this range
PATIENCE: Final = (0.1, 1.5)  # a user cancels after a time in this range, in durations of the job


@dataclass(frozen=True, slots=True)
class Row:
    """Constants of one model on one data set; Table 2 lists several sizes of each data set."""

    parameters: float  # millions
    fixed_ms: float  # milliseconds per forward and backward pass, for any batch
    peak: float  # largest speed R, samples per second
    memory: int  # largest local batch, samples
    first: int  # first global batch of an elastic job, samples; m0
    tuned: int  # batch per GPU that users of fixed batches choose, samples
    most: int  # largest global batch of an elastic job, samples
    noise: tuple[float, float]  # noise scale of the gradients at the start and at the target
    epochs: int  # number of epochs to the target, at the first batch
    target: float  # validation accuracy
    classes: int  # the loss of an untrained model is ln(classes)
    floor: float  # lower limit of the training loss


# fmt: off
ROWS: Final[Mapping[str, Row]] = {
    #               parameters fixed peak memory first tuned most    noise       epochs classes
    "alexnet-imagenet":    Row(61.1, 15, 1000, 1024, 64, 128, 1024, (400, 4000), 25, .65, 15, .45),
    "resnet50-imagenet":   Row(25.6, 30,  400,  128, 32,  64, 1024, (600, 6000), 20, .75, 15, .30),
    "vgg16-imagenet":     Row(138.4, 20,  230,   64, 32,  32, 1024, (500, 5000), 20, .72, 15, .35),
    "inceptionv3-imagenet": Row(27.2, 45, 259,   96, 32,  64, 1024, (600, 6000), 20, .75, 15, .30),
    "resnet18-cifar10":    Row(11.2, 20, 2800, 1024, 64, 128, 2048, (300, 3000), 10, .85, 10, .05),
    "vgg16-cifar10":       Row(15.0, 12, 4900, 2048, 64, 128, 2048, (300, 3000), 12, .85, 10, .05),
    "googlenet-cifar10":    Row(6.2, 50,  800,  512, 64, 128, 2048, (300, 3000), 10, .85, 10, .05),
    "bert-cola":          Row(110.0, 35,  150,   48, 16,  16,  256,   (60, 600),  4, .80,  2, .10),
    "bert-mrpc":          Row(110.0, 35,  150,   48, 16,  16,  256,   (60, 600),  5, .84,  2, .10),
    "bert-sst2":          Row(110.0, 35,  150,   48, 16,  16,  256,   (60, 600),  3, .90,  2, .08),
}
# fmt: on

SIZES: Final[Mapping[str, tuple[int, ...]]] = {  # ||D||, samples; ONES Table 2
    "imagenet": (10_000, 12_000, 14_000, 16_000, 18_000, 20_000),  # with 10, 12, ... 20 classes
    "cifar10": (20_000, 25_000, 30_000, 35_000, 40_000),
    "cola": (5_000, 6_000, 7_000, 8_000),
    "mrpc": (3_600,),
    "sst2": (10_000, 12_000, 14_000, 16_000, 18_000, 20_000),
}

# A key is a constant above, a field of `Row`, or this field for one entry ("bert-cola.peak") or for
# one model ("bert.peak"). The most specific key applies.
SOURCES: Final[Mapping[str, str]] = {
    "parameters": "source: torchvision's model table, fp32; four bytes each go through all-reduce",
    "inceptionv3.parameters": "source: torchvision's model table, with the auxiliary classifier",
    "resnet18-cifar10.parameters": "source: ResNet18 with a 3x3 stem and 10 classes has 11.17 M",
    "vgg16-cifar10.parameters": "source: 14.7 M in convolutions, and a small classifier",
    "googlenet-cifar10.parameters": "source: GoogLeNet without auxiliary classifiers, 10 classes",
    "bert.parameters": "source: Devlin et al. 2018, section 3, BERT-base",
    "fixed_ms": "chosen: kernel launches of forward, backward and optimizer in PyTorch 1.4, about"
    " 0.1 ms a layer",
    "resnet50.fixed_ms": "source: NVIDIA DeepLearningExamples ResNet50 v1.5 on V100: forward takes"
    " 10 ms for batches of 1 to 8; three times that with backward",
    "alexnet.peak": "chosen: decoding feeds about 100 images/s per core, ten cores per GPU; the GPU"
    " alone would do more",
    "resnet50.peak": "source: Lambda's V100 benchmark 405 images/s, fp32; NVIDIA DeepLearning"
    "Examples 367 images/s at batch 128, which a + m/R meets within 2%",
    "vgg16-imagenet.peak": "chosen: 31 GFLOP forward, three times that with backward, at 15.7"
    " TFLOP/s with Winograd's savings, 1.35x; direct convolution could do 170 images/s",
    "inceptionv3.peak": "source: Lambda's V100 benchmark 259 images/s, fp32, taken as the peak",
    "resnet18-cifar10.peak": "chosen: 3.3 GFLOP a sample at 60% of 15.7 TFLOP/s",
    "vgg16-cifar10.peak": "chosen: 1.9 GFLOP a sample at 60% of 15.7 TFLOP/s",
    "googlenet-cifar10.peak": "chosen: 9.2 GFLOP a sample at 47% of 15.7 TFLOP/s, less than the"
    " others for its many small kernels",
    "bert.peak": "chosen: 6 x 86 M x 128 tokens = 66 GFLOP a sequence at 63% of 15.7 TFLOP/s",
    "memory": "chosen: largest power of two whose activations fit 16 GB in fp32",
    "resnet50.memory": "source: NVIDIA suggests 128 in single precision for a V100 with 16 GB",
    "inceptionv3.memory": "chosen: ResNet50's 128, for 299 instead of 224 pixels",
    "bert.memory": "chosen: 32 of 128 tokens are known to fit 12 GB; in proportion 48 fit 16 GB",
    "first": "chosen: 32 or 64 fit one GPU of any kind, and are where tutorials begin",
    "bert.first": "source: Devlin et al. 2018, appendix A.3: 16 or 32",
    "tuned": "chosen: a batch at which the GPU is well used and memory does not end; linear scaling"
    " (Goyal et al. 2017) from there",
    "bert.tuned": "source: Devlin et al. 2018, appendix A.3: 16 or 32; 16, so that eight GPUs do"
    " not ask for more than 128",
    "most": "chosen: at least ten steps an epoch on the smallest set; ONES figure 2 goes to 2048 on"
    " CIFAR10",
    "bert.most": "chosen: sixteen times the first; fine-tuning is not known to bear more",
    "noise": "chosen: some hundreds at first; it grows by an order of magnitude in training, as"
    " McCandlish et al. 2018 saw with image classifiers",
    "bert.noise": "chosen: fine-tuning needs little averaging: batches of 16 or 32 suffice",
    "epochs": "chosen: modest targets, for a thousand images in each of 10 to 20 classes",
    "cifar10.epochs": "chosen: a modest target, which known recipes pass after about ten epochs",
    "bert.epochs": "source: Devlin et al. 2018, appendix A.3: 2 to 4; chosen: 5 for the small MRPC",
    "target": "chosen: what the model reaches with certainty; only the epoch that passes it counts",
    "classes": "source: ONES Table 2; 15 is the mean of 10 to 20",
    "floor": "chosen: smaller for models that fit their set more closely; only curves show it",
    "GPUS_PER_NODE": "source: ONES section 4.1",
    "NODE_BYTES_PER_S": "chosen: what a ring reaches on NVLink with three bricks between V100s",
    "NETWORK_BYTES_PER_S": "chosen: what a ring reaches on EDR Infiniband of 12.5 GB/s",
    "NODE_HOP_S": "chosen: one kernel launch",
    "NETWORK_HOP_S": "chosen: a kernel launch, a copy and a message",
    "COLD_START_S": "chosen: imports, CUDA, data; with a checkpoint ONES has above 20 s",
    "RESTART_S": "source: ONES figure 16: above 20 s; chosen: linear in the parameters up to 40 s",
    "PREPARE_S": "chosen: a cold start without what a running group does for the newcomer",
    "SWITCH_S": "source: ONES section 4.3: around one second",
    "ABOVE_TARGET": "source: ONES section 4.1",
    "SAFE_JUMP": "source: ONES section 3.3.2 doubles R; stricter than figure 14, which bears 4x",
    "JUMP_EPOCHS": "chosen: ONES figure 13 needs many epochs after 16x; here it costs three",
    "EPOCHS_SPREAD": "chosen: what a user sees from seed to seed",
    "LOSS_LEFT": "chosen: curves are flat when the target is passed",
    "NOISE_SPREAD": "chosen: what averaging over an epoch leaves",
    "LOSS_SPREAD": "chosen: means over an epoch are smooth",
    "ERRATIC_SPREAD": "chosen: much more than that",
    "SPIKES": "chosen: one or two in a job",
    "SPIKE": "chosen: seen by any forecast",
    "PLATEAU": "chosen: longer than the few epochs that a forecast looks back",
    "MAX_SLOTS": "chosen: half of the paper's cluster",
    "USER_SLOTS": "chosen: powers of two up to two nodes",
    "USER_SHARES": "chosen: most jobs in Microsoft's trace are small (Jeon et al. 2019)",
    "CRASHES": "chosen: anywhere but at the very ends",
    "PATIENCE": "chosen: before its first tenth is done, or when it would have been done at once",
    "SIZES": "source: ONES Table 2",
}


def source(application: str, field: str) -> str | None:
    """Return the source of a field of `ROWS[application]`, or None if no source is known."""
    model, _, dataset = application.partition("-")
    for name in (f"{application}.{field}", f"{model}.{field}", f"{dataset}.{field}", field):
        if name in SOURCES:
            return SOURCES[name]
    return None
