"""A stand-in for vLLM beside SGLang's CPU backend, which imports two operators of it for every layer and runs its own
instead of them where they are not compiled. A process that tests SGLang has no other vLLM.
"""
