from fixtures import own_folder, run_in_tmp_path, same_seed, without_leftovers  # noqa: F401
