"""Wrong input: every refusal is one line on standard error, with exit status 2 and nothing on standard output."""

import json
from pathlib import Path
from typing import Any

import pytest

from gbfunc.cli import main
from tests.test_cli import SMALL

OPTIONS = [
    # The parser
    ("train --epochs x", "error: --epochs must be INT, got 'x'"),
    ("train --epoch 3", "Unrecognized options: --epoch (did you mean --epochs?): see gbfunc train --help"),
    ("train --genome-size 9", "options: --genome-size (did you mean --genome-bytes or --genome-params"),
    ("train --hypernet foo", "invalid choice 'foo' for argument '--hypernet'"),
    ("train --out=", "--out needs a value, got ''"),
    ("eval a.genome", "Missing from gbfunc eval: --genome FILE (got 'a.genome' without the name of an option): see"),
    # Bounds, alternatives, and options that need or exclude others
    ("train --epochs 1 --steps 3", "give at most one of --epochs and --steps, got 1 and 3"),
    ("train --genome-params 500 --compression 40", "at most one of --genome-params, --genome-bytes and --compression"),
    ("compare --bytes 2000 --sizes 300 400", "give at most one of --sizes and --bytes, got 300 400 and 2000"),
    ("train --steps 0", "--steps must be at least 1, got 0"),
    ("train --warmup 2", "--warmup must be from 0 to 1, got 2.0"),
    ("train --seed -1", "--seed must be at least 0 and below 2**63, got -1"),
    ("train --log csv --checkpoint-every 5", "--log and --checkpoint-every can be used only with --out"),
    ("train --resume auto", "--resume auto needs --out"),
    ("train --finetune 10", "--finetune can be used only with --dtype"),
    ("train --dtype auto", "--dtype auto trains for a size in bytes: pass --genome-bytes"),
    ("plan --memory 16GB", "--memory can be used only with --ranks"),
    ("train --dense --rule 0=none", "--rule cannot be used with --dense"),
    ("bench --repeat 2 --calibrate", "--repeat cannot be used with --calibrate"),
    ("bench --device meta", "--device 'meta' cannot be used"),
    ("bench --quick --cases nope", "--cases must be some of demo small_mlp"),
    # Task, p-net and plan
    ("train --data-dir .", "the task digits reads no files (it has no parameter data_dir), got .: leave it out"),
    ("train --task nope", "no task 'nope': choose one of"),
    ("train --task mnist", "the mnist task needs --data-dir: the folder with its four IDX .gz files"),
    ("train --task mnist --data-dir /", "expected train-images-idx3-ubyte.gz and three more IDX files in /, got none"),
    ("train --task trec --data-dir /", "/train.txt"),
    ("train --out /proc/x", "--out must be a folder for writing, got /proc/x (No such file or directory)"),
    ("train --task no.such.module:task", "cannot import no.such.module"),
    ("train --pnet own.py:make", "No module named 'own': write own:make, in the folder of the file"),
    ("train --env x", "the task digits has no option env"),
    ("train --pnet gpt --sizes 3 4", "--sizes is for the p-nets mlp and actor_critic, got gpt"),
    ("train --pnet-config {", "--pnet-config must be a JSON object such as"),
    ('plan --sizes 64 9 10 --pnet-config {"hidden":[8]}', "got --sizes and --pnet-config (hidden)"),
    ("train --task text --data-dir /no/such/file", "--data-dir: no such file or folder: /no/such/file"),
    ("train --sizes 64 10 12", "must start with 64 inputs and end with 10"),
    (f"plan --sizes 64 {10**14} 10", "can't allocate memory: you tried to allocate"),
    ("plan --hypernet xox", "this size is the task's default: --genome-params, --genome-bytes and"),
    ("plan --genome-params 3", "a genome of 3 parameters cannot be reached"),
    ("plan --compression 1e6", "a compression of 1,000,000x cannot be reached: the smallest"),
    ("train --rule head", "--rule must be REGEX=TYPE or REGEX=none, such as 'head=low_rank', got 'head'"),
    ("train --rule 0.weight=foo", "--rule: no type of g-net 'foo': choose one of "),
    ('train --rule 0.weight=low_rank{"rnk":2}', "the g-net low_rank has no option rnk: its options are rank"),
    ('train --hypernet-config {"feature":2}', "the g-net periodic has no option feature: its options are features"),
    ("train --base none --target-modules query", "--base none has no adapter: drop --target-modules"),
    # Training
    ("train --optimizer adam", "--optimizer must be a class of torch.optim (ASGD, Adadelta, "),
    ("train --batch-size 5000 --log csv --out a/b", "batch size must be between 1 and the 1197 training examples"),
    ('train --optimizer-config {"nope":1} --checkpoint-every 1 --out a/b', "Adam refuses the options of all leaves"),
    ('train --optimizer-config {"lr":0.1}', "has ['lr']: use --lr, --direct-lr and --weight-decay for these"),
    ("train --mesh tensor=3", "the axes' product must be the number of ranks, 1, got data 1 * pipeline 1 * gnets 1"),
    ("train --mesh rows=2", "--mesh must name ranks along axes (data, pipeline, gnets, tensor), such as"),
    ("train --pipeline gpipe", "--pipeline gpipe needs a pipeline axis, such as --mesh pipeline=2"),
    ("train --parallel own:styles", "--parallel own:styles needs a tensor axis, such as --mesh tensor=2"),
    # Files
    ("train --config none.toml", "--config: no such file: none.toml"),
    ("train --out " + "x" * 300, "x/metrics.json: File name too long"),
    # Layouts and comparisons
    ("plan --ranks 2 --memory 1Gbit", "--memory must be a size such as 16GB or 512MiB, got '1Gbit'"),
    ("plan --ranks 2 --link fast", "--link must be a rate such as 100Gbit or 12.5GB, got 'fast'"),
    ("plan --ranks 2 --device nowhere.json", "no such device file: nowhere.json"),
    ("compare --bytes 300", "at most 300 bytes cannot be reached: the smallest genome's file has"),
]


@pytest.mark.parametrize(("words", "message"), OPTIONS)
def test_wrong_options(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    told = command(words.split(), 2)
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("gbfunc: error: ") and message in told.err and "Errno" not in told.err
    assert not list(tmp_path.iterdir()), "a refused command leaves no folder"


@pytest.mark.parametrize("name", ["train", "demo", "compare", "bench", "federated"])
@pytest.mark.parametrize("below", ["", "a/b"])
def test_out_that_is_a_file(name: str, below: str, tmp_path: Path, command: Any) -> None:
    (tmp_path / "file").write_text("mine")
    told = command([name, "--out", str(tmp_path / "file" / below)], 2).err
    assert f"must be a folder for writing, got {tmp_path / 'file' / below} (" in told
    assert told.count("\n") == 1


FILES = [
    ("a.toml", "epoch = 3", "a.toml: there is no option 'epoch' (did you mean epochs?)"),
    ("a.json", "[1]", "a.json must have options by name, got [1]"),
    ("a.yaml", "lr: [", "a.yaml cannot be read: "),
    ("a.ini", "lr = 1", "a.ini cannot be read: its name must end in .toml"),
    ("a.toml", "compile = 'yes'", "a.toml: compile must be true or false, got 'yes'"),
    ("a.toml", "lr = true", "a.toml: lr must not be true or false, got True"),
    ("a.toml", "encodings.a = ['binary']", "--encodings: 'a': expected codes of [rows, columns], got ['binary']"),
    ("a.toml", "encodings.'0.weight' = ['binaries', 'default']", "--encodings: '0.weight': expected an encoding"),
    ("a.toml", "encodings.a = ['binary', { type = 'table', file = 'none.npy' }]", "none.npy"),
    ("a.toml", "encodings.a = ['binary', 'binary']", "encodings names 'a', which is no parameter"),
    ("a.toml", "encodings.'0.weight' = ['binary', { type = 'grid', dims = [7, 8] }]", "codes 56 positions"),
]


@pytest.mark.parametrize(("name", "text", "message"), FILES)
def test_wrong_files_of_options(name: str, text: str, message: str, tmp_path: Path, command: Any) -> None:
    (tmp_path / name).write_text(text)
    told = command(["train", "--sizes", "64", "48", "10", "--config", str(tmp_path / name)], 2).err
    assert message in told and told.count("\n") == 1


def test_genomes_that_do_not_fit(tmp_path: Path, shared_data: Path, command: Any) -> None:
    assert main(["train", *SMALL, "--steps", "1", "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "none").write_bytes(b"not a genome")
    path, data = tmp_path / "run" / "genome.safetensors", str(shared_data / "mnist")
    genome, before = ["--genome", str(path)], path.read_bytes()
    other = "does not fit the p-net; it needs the same --pnet and --pnet-config as in its training: the plan was made"
    for argv, message in (
        (["eval", "--genome", str(tmp_path / "none")], "is not a valid genome: it is neither a genome nor"),
        (["eval", *genome, "--task", "mnist", "--data-dir", data], other),
        (["sample", *genome], "expected a task of texts with encode and decode, got digits"),
        (["eval", *genome, "--pnet-config", json.dumps({"hidden": [47]})], other),
        (["export", *genome, "--out", str(path.parent / "." / path.name)], "must differ from the genome's file, got"),
        (["export", *genome, "--out", str(tmp_path / "a" / "net.unknown")], "got the suffix '.unknown'; gbfunc export"),
        (["export", *genome, "--out", str(path.parent / "metrics.json" / "net.onnx")], "must be a folder for writing"),
        (["export", *genome, "--out", str(path.parent)], "must be a file, got the folder"),
    ):
        told = command(argv, 2)
        assert message in told.err and told.err.count("\n") == 1 and told.out == ""
    assert path.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["none", "run"]
    assert main(["eval", *genome, "--pnet-config", json.dumps({"hidden": [48]})]) == 0
