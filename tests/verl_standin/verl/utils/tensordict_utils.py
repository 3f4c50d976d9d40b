def get_non_tensor_data(data, key, default):
    return data.get(key, default)
