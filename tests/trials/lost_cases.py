from tests.trials.place import Case


def cases() -> list[Case]:
    return []
