"""Adapters that plug xfer into RL frameworks, one module per framework. Each names the release whose interface it implements.

Importing this package imports no framework; importing a module of it imports that module's framework.

    vllm_trainer  vLLM's trainer half, `WeightTransferTrainerFactory.trainer_init(XferTrainerInitInfo(...), ...)`
    verl          a checkpoint engine, `backend: xfer` with `custom_backend_module: xfer.integrations.verl`
    trl           `with refits(...):` around the construction of a TRL trainer
    skyrl         a weight transfer strategy, `class Worker(RefitByXfer, FSDPPolicyWorkerBase)`
    nemo_rl       a weight synchronizer, `policy_generation.weight_synchronizer = XferWeightSynchronizer(...)`
    common        their common parts, which a job on Ray can use, too: an invitation to a job
"""
