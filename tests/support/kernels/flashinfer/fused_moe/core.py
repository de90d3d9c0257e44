from enum import IntEnum


class ActivationType(IntEnum):
    Swiglu = 3
    Geglu = 4
    Relu2 = 6
