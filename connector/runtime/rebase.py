"""How the connectors extend objects that vLLM builds itself.

vLLM's Mooncake connectors build their halves and threads inside their own constructors, by name, with no hook to pass
another class. Copying those constructors would tie kvledger to one vLLM version, and swapping names in vLLM's modules
would change them for everybody. So the finished object is rebased: it becomes an instance of a subclass of ours, which
adds no constructor.
"""

from typing import TypeVar

T = TypeVar("T")


def rebase_class(instance: object, subclass: type[T]) -> T:
    """Turn `instance`, an object of `subclass`'s direct base, into a `subclass`, and return it.

    Raises:
        TypeError: `subclass` does not extend the class of `instance`, so it would be no true instance.
    """
    if type(instance) not in subclass.__bases__:
        raise TypeError(f"{subclass.__name__} does not extend {type(instance).__name__}")
    instance.__class__ = subclass
    return instance  # type: ignore[return-value]
