"""The example's rollout, with one more thing to ask: a fault in the live engine. For tests of what the gate can see.

POST /fault {"name", "args"}: calls that method of `Faults` on every worker. Run like examples.grpo.rollout.
"""

from examples.grpo import rollout


class Faults:
    """Mixed into vLLM's workers. Each leaves the engine as a wrong refit would have left it."""

    def swap_gate_up(self) -> int:
        """Gate rows where up rows belong and the other way round, in every layer. Returns how many weights."""
        found = 0
        for name, p in self.model_runner.model.named_parameters():
            if name.endswith(("w13_weight", "gate_up_proj.weight")):
                p.data.copy_(p.data.roll(p.shape[-2] // 2, dims=-2))  # the upper half of the rows is gate
                found += 1
        return found

    def swap_experts(self) -> int:
        """Experts 0 and 1 of the first layer that has experts change places."""
        found = 0
        for name, p in self.model_runner.model.named_parameters():
            if ".layers.0." in name and name.endswith(("w13_weight", "w2_weight")):
                p.data[[0, 1]] = p.data[[1, 0]].clone()
                found += 1
        return found

    def stale_layer(self, refits: int) -> int:
        """In the next `refits` refits, layer 0 keeps the bytes that it has now: they are put back after the wire and before
        anything is compared or committed. Returns how many storages that is."""
        from xfer.participants.worker import WorkerSession

        before, after, left = WorkerSession.before, WorkerSession.after, [refits]
        old: dict[int, object] = {}

        def save(session, go, plan):
            if left[0]:
                old.update(
                    {i: t.clone() for i, t in enumerate(session.side._roots) if ".layers.0." in session.side._names[i]}
                )
            return before(session, go, plan)

        def put_back(session, go, plan):
            if left[0]:
                left[0] -= 1
                for i, t in old.items():
                    session.side._roots[i].copy_(t)
            return after(session, go, plan)

        WorkerSession.before, WorkerSession.after = save, put_back
        return sum(".layers.0." in name for name, _ in self.model_runner.model.named_parameters())


class Faulty(rollout.Rollout):
    def answer(self, path: str, body: dict) -> dict:
        if path == "/fault":
            return {"found": self.llm.collective_rpc(body["name"], args=tuple(body["args"]))}
        return super().answer(path, body)


if __name__ == "__main__":
    rollout.main(Faulty, worker_extension_cls="tests.support.grpo_rollout.Faults")
