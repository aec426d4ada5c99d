from fixtures import run_in_tmp_path, same_seed, without_leftovers  # noqa: F401
