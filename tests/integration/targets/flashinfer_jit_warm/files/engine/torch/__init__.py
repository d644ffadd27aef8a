"""As much of torch as a warm-up touches."""


class cuda:
    @staticmethod
    def is_available():
        return False
