"""Configurations with the settings of those in LMCache's public documentation and examples, and what they become.

Each is (name, LMCache's YAML, kvcore's configuration, settings that are left out).
"""

from typing import Any

L1_5 = {"size": "5GiB"}

YAML: tuple[tuple[str, str, dict[str, Any], set[str]], ...] = (
    (
        "cpu",
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5.0\n",
        {"l1": L1_5, "chunk_tokens": 256},
        set(),
    ),
    ("huge pages", "local_cpu_use_hugepages: true\n", {"l1": L1_5}, {"local_cpu_use_hugepages"}),
    (
        "disk",
        "chunk_size: 256\nlocal_cpu: false\nmax_local_cpu_size: 5.0\n"
        'local_disk: "file:///local/disk_test/"\nmax_local_disk_size: 5.0\nextra_config: {use_odirect: True}\n',
        {
            "l1": L1_5,
            "chunk_tokens": 256,
            "l2": [{"storage": {"plugin": "disk", "path": "/local/disk_test/", "capacity": "5GiB"}}],
        },
        set(),
    ),
    (
        "several disks",
        'local_disk: "file:///mnt/a/,file:///mnt/b/"\nlocal_disk_path_sharding: by_gpu\n',
        {"l1": L1_5, "l2": [{"storage": {"plugin": "disk", "path": "/mnt/a/", "capacity": "auto"}}]},
        {"local_disk_path_sharding"},
    ),
    (
        "redis",
        'chunk_size: 256\nremote_url: "redis://your-redis-host:6379"\nremote_serde: "naive"\n',
        {
            "l1": L1_5,
            "chunk_tokens": 256,
            "l2": [{"storage": {"plugin": "redis", "url": "redis://your-redis-host:6379"}}],
        },
        set(),
    ),
    (
        "sentinels",
        'remote_url: "redis-sentinel://localhost:26379,localhost:26380"\nremote_serde: naive\n',
        {
            "l1": L1_5,
            "l2": [
                {
                    "storage": {
                        "plugin": "redis",
                        "url": "redis://localhost:26379,localhost:26380",
                        "sentinel_master": "redismaster",
                    }
                }
            ],
        },
        set(),
    ),
    (
        "resp",
        "chunk_size: 256\nlocal_cpu: false\nmax_local_cpu_size: 20.0\nremote_url: resp://localhost:6379\n"
        "async_loading: false\nremote_serde: naive\nblocking_timeout_secs: 120\nextra_config:\n"
        "  resp_num_threads: 8\n  save_chunk_meta: False\n  username: default\n  password: hunter2\n",
        {
            "l1": {"size": "20GiB"},
            "chunk_tokens": 256,
            "l2": [
                {
                    "storage": {
                        "plugin": "redis",
                        "url": "redis://localhost:6379",
                        "password_env": "REDIS_PASSWORD",
                        "username": "default",
                        "connections": 8,
                    },
                    "timeout": "120s",
                }
            ],
        },
        {"async_loading", "extra_config.save_chunk_meta"},
    ),
    (
        "valkey cluster",
        "remote_url: valkey://one:6379, two:6379\nextra_config:\n"
        "  valkey_mode: cluster\n  valkey_username: me\n  valkey_password: hunter2\n",
        {
            "l1": L1_5,
            "l2": [
                {
                    "storage": {
                        "plugin": "redis",
                        "url": "redis://one:6379,two:6379",
                        "cluster": True,
                        "password_env": "REDIS_PASSWORD",
                        "username": "me",
                    }
                }
            ],
        },
        set(),
    ),
    (
        "s3 express",
        'local_cpu: False\nmax_local_cpu_size: 10\nsave_unfull_chunk: False\nremote_serde: "naive"\n'
        'remote_url: "s3://mine--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com"\nextra_config:\n'
        "  s3_num_io_threads: 64\n  s3_prefer_http2: True\n  s3_region: us-east-1\n  s3_enable_s3express: True\n"
        "  aws_access_key_id: AKIA\n  aws_secret_access_key: hunter2\n",
        {"l1": {"size": "10GiB"}},
        {
            "save_unfull_chunk", "remote_url", "remote_serde", "extra_config.s3_num_io_threads",
            "extra_config.s3_prefer_http2", "extra_config.s3_region", "extra_config.s3_enable_s3express",
            "extra_config.aws_access_key_id", "extra_config.aws_secret_access_key",
        },
    ),
    (
        "s3",
        "save_unfull_chunk: False\nremote_url: s3://your-bucket-name\nextra_config:\n  s3_region: us-east-1\n"
        "  s3_num_io_threads: 64\n  aws_access_key_id: AKIA\n  aws_secret_access_key: hunter2\n",
        {
            "l1": L1_5,
            "l2": [
                {"storage": {"plugin": "s3", "bucket": "your-bucket-name", "region": "us-east-1", "concurrency": 64}}
            ],
        },
        {"save_unfull_chunk"},
    ),
    (
        "s3 compatible",
        "max_local_cpu_size: 50\nenable_async_loading: True\nremote_url: s3://test-127.example.com\n"
        "blocking_timeout_secs: 100\nextra_config:\n  s3_max_io_concurrency: 320\n  s3_max_inflight_reqs: 320\n"
        "  s3_region: US-WEST-04A\n  save_chunk_meta: False\n  s3_file_prefix: test-2\n",
        {
            "l1": {"size": "50GiB"},
            "l2": [
                {
                    "storage": {
                        "plugin": "s3",
                        "endpoint": "https://example.com",
                        "addressing": "virtual",
                        "bucket": "test-127",
                        "region": "US-WEST-04A",
                        "prefix": "test-2",
                        "concurrency": 256,
                    },
                    "timeout": "100s",
                }
            ],
        },
        {"enable_async_loading", "extra_config.s3_max_io_concurrency", "extra_config.save_chunk_meta"},
    ),
    (
        "mooncake",
        'remote_url: "mooncakestore://127.0.0.1:50051/"\nremote_serde: naive\nlocal_cpu: False\nmax_local_cpu_size: 5\n'
        "extra_config:\n  local_hostname: localhost\n  metadata_server: http://127.0.0.1:8080/metadata\n"
        "  protocol: tcp\n  master_server_address: localhost:50051\n  global_segment_size: 3355443200\n"
        "  local_buffer_size: 1073741824\n  transfer_timeout: 1\n",
        {
            "l1": L1_5,
            "l2": [
                {
                    "storage": {
                        "plugin": "mooncake",
                        "master_server_address": "localhost:50051",
                        "metadata_server": "http://127.0.0.1:8080/metadata",
                        "local_hostname": "localhost",
                        "protocol": "tcp",
                        "global_segment_size": "3200MiB",
                        "transfer_timeout": "1s",
                    }
                }
            ],
        },
        {"extra_config.local_buffer_size"},
    ),
    (
        "nixl files",
        "nixl_buffer_size: 1073741824\nnixl_buffer_device: cpu\nextra_config:\n  enable_nixl_storage: true\n"
        "  nixl_backend: POSIX\n  nixl_pool_size: 64\n  nixl_path: /mnt/nixl/cache/\n  use_direct_io: True\n"
        '  nixl_backend_params: {use_uring: "true"}\n',
        {
            "l1": L1_5,
            "l2": [
                {
                    "storage": {
                        "plugin": "nixl",
                        "backend": "posix",
                        "path": "/mnt/nixl/cache/",
                        "params": {"use_uring": "true"},
                    }
                }
            ],
        },
        {"nixl_buffer_size", "nixl_buffer_device", "extra_config.nixl_pool_size"},
    ),
    (
        "nixl objects",
        "extra_config:\n  enable_nixl_storage: true\n  nixl_backend: OBJ\n  nixl_pool_size: 0\n"
        "  nixl_presence_cache: False\n  nixl_backend_params:\n    access_key: AKIA\n    secret_key: hunter2\n"
        "    bucket: mine\n    region: here\n    endpoint_override: https://objects.example.com\n",
        {
            "l1": L1_5,
            "l2": [
                {
                    "storage": {
                        "plugin": "nixl",
                        "backend": "obj",
                        "bucket": "mine",
                        "region": "here",
                        "endpoint": "https://objects.example.com",
                    }
                }
            ],
        },
        {"extra_config.nixl_pool_size", "extra_config.nixl_presence_cache"},
    ),
    (
        "gds",
        "local_cpu: false\ngds_path: /mnt/gds/cache\ngds_buffer_size: 8192\n",
        {"l1": L1_5, "l2": [{"storage": {"plugin": "disk", "path": "/mnt/gds/cache"}}]},
        {"gds_buffer_size"},
    ),
    (
        "weka",
        "weka_path: /mnt/weka/cache\ncufile_buffer_size: 8192\nextra_config:\n  gds_io_threads: 32\n",
        {"l1": L1_5, "l2": [{"storage": {"plugin": "disk", "path": "/mnt/weka/cache"}}]},
        {"cufile_buffer_size", "extra_config.gds_io_threads"},
    ),
    (
        "shared file systems",
        'remote_storage_plugins: ["fs.primary", "fs.backup"]\nextra_config:\n'
        "  remote_storage_plugin.fs.primary.base_path: /mnt/one\n"
        "  remote_storage_plugin.fs.backup.base_path: /mnt/two\n  save_chunk_meta: false\n",
        {
            "l1": L1_5,
            "l2": [
                {"storage": {"plugin": "disk", "path": "/mnt/one"}},
                {"storage": {"plugin": "disk", "path": "/mnt/two"}},
            ],
        },
        {"extra_config.save_chunk_meta"},
    ),
    (
        "file system by url",
        'remote_url: "fs://localhost:0/tmp/lmcache-fs"\n',
        {"l1": L1_5, "l2": [{"storage": {"plugin": "disk", "path": "/tmp/lmcache-fs"}}]},
        set(),
    ),
    (
        "lmcache's own server",
        'local_device: "cpu"\nremote_url: "lm://localhost:65432"\nremote_serde: "cachegen"\npipelined_backend: False\n',
        {"l1": L1_5},
        {"local_device", "remote_url", "remote_serde", "pipelined_backend"},
    ),
    (
        "blending",
        'enable_blending: true\nuse_layerwise: true\nblend_special_str: " # # "\n',
        {"l1": L1_5},
        {"enable_blending", "use_layerwise", "blend_special_str"},
    ),
    (
        "peer to peer",
        "enable_p2p: True\np2p_host: localhost\np2p_init_ports: 8200\ntransfer_channel: nixl\n"
        "enable_controller: True\nlmcache_instance_id: one\ncontroller_pull_url: localhost:8300\n"
        "lmcache_worker_ports: 8500\nextra_config:\n  lookup_backoff_time: 0.001\n",
        {"l1": L1_5},
        {
            "enable_p2p", "p2p_host", "p2p_init_ports", "transfer_channel", "enable_controller", "lmcache_instance_id",
            "controller_pull_url", "lmcache_worker_ports", "extra_config.lookup_backoff_time",
        },
    ),
    (
        "prefill and decode",
        "local_cpu: False\nenable_pd: True\npd_role: sender\npd_proxy_port: 7500\npd_buffer_size: 1073741824\n"
        "nixl_backends: [UCX]\n",
        {"l1": L1_5},
        {"enable_pd", "pd_role", "pd_proxy_port", "pd_buffer_size", "nixl_backends"},
    ),
    (
        "sglang",
        "chunk_size: 256\nlocal_cpu: true\nuse_layerwise: true\nmax_local_cpu_size: 20\nsave_unfull_chunk: false\n",
        {"l1": {"size": "20GiB"}, "chunk_tokens": 256},
        {"use_layerwise", "save_unfull_chunk"},
    ),
    (
        "behaviour",
        "cache_policy: LFU\nlookup_timeout_ms: 3000\npin_timeout_sec: 300\nsave_decode_cache: true\n"
        "min_retrieve_tokens: 1024\nenable_kv_events: true\ninternal_api_server_enabled: true\n",
        {"l1": {"size": "5GiB", "eviction": "lfu", "lease": "300s"}, "lookup_timeout": "3000ms"},
        {"min_retrieve_tokens", "enable_kv_events", "internal_api_server_enabled"},
    ),
    (
        "external",
        "remote_url: external://host:0/some.module/?connector_name=Some\nextra_config:\n  ext_some_ping: True\n",
        {"l1": L1_5},
        {"remote_url", "extra_config.ext_some_ping"},
    ),
    (
        "stores that kvcore lacks",
        "max_local_cpu_size: 0\nmaru_path: maru://localhost:5555\neic_instance_id: mine\n"
        'remote_storage_plugins: ["gcs.us", "redis"]\nremote_url: azure://container\nextra_config:\n'
        "  remote_storage_plugin.gcs.us.bucket_uri: gs://mine/prod\n  azure_account_key: hunter2\n"
        "  remote_storage_plugin.redis.redis_url: redis://host:6379\n  rust_raw_block.device_path: /dev/nvme0n1\n",
        {"l1": {"size": "auto"}, "l2": [{"storage": {"plugin": "redis", "url": "redis://host:6379"}}]},
        {
            "maru_path", "eic_instance_id", "remote_storage_plugins", "remote_url",
            "extra_config.remote_storage_plugin.gcs.us.bucket_uri", "extra_config.azure_account_key",
            "extra_config.rust_raw_block.device_path",
        },
    ),
    (
        "redis by the plugin's own name",
        'remote_storage_plugins: ["redis.one"]\nremote_serde: naive\nextra_config:\n'
        "  remote_storage_plugin.redis.redis_url: redis://host:6379\n",
        {"l1": L1_5, "l2": [{"storage": {"plugin": "redis", "url": "redis://host:6379"}}]},
        set(),
    ),
    (
        "redis by a name that LMCache does not read",
        'remote_storage_plugins: ["redis"]\nextra_config:\n'
        "  remote_storage_plugin.redis.url: redis://me:hunter2@host:6379\n",
        {
            "l1": L1_5,
            "l2": [
                {
                    "storage": {
                        "plugin": "redis",
                        "url": "redis://host:6379",
                        "password_env": "REDIS_PASSWORD",
                        "username": "me",
                    }
                }
            ],
        },
        set(),
    ),
    (
        "redis by remote_url",
        'remote_storage_plugins: ["redis"]\nremote_url: redis://host:6379\n',
        {"l1": L1_5, "l2": [{"storage": {"plugin": "redis", "url": "redis://host:6379"}}]},
        set(),
    ),
    (
        "plugins without an address",
        'remote_storage_plugins: ["redis", "fs.one"]\nremote_serde: naive\nblocking_timeout_secs: 3\n',
        {"l1": L1_5},
        {"remote_storage_plugins", "remote_serde", "blocking_timeout_secs"},
    ),
    (
        "of another form",
        "cache_config:\n  chunk_size: 131072\nlogging:\n  level: INFO\n",
        {"l1": L1_5},
        {"cache_config.chunk_size", "logging.level"},
    ),
)  # fmt: skip

_RESP = '{"type": "resp", "host": "localhost", "port": 6379, "num_workers": 8, "max_capacity_gb": 10, "eviction": {}}'
_SOCKET = {"url": "unix:///run/kvcore/kvcore.sock"}

FLAGS: tuple[tuple[str, list[str], dict[str, Any], set[str]], ...] = (
    (
        "quick start",
        ["lmcache", "server", "--l1-size-gb", "100", "--eviction-policy", "LRU"],
        {"l1": {"size": "100GiB", "eviction": "lru"}, "server": _SOCKET},
        set(),
    ),
    (
        "old module",
        ["/opt/venv/bin/python3", "-m", "lmcache.v1.multiprocess.server", "--host", "0.0.0.0", "--port", "6555",
         "--cpu-buffer-size", "60", "--max-workers", "4"],
        {"l1": {"size": "60GiB"}, "server": _SOCKET},
        {"max-workers"},
    ),
    (
        "resp",
        ["lmcache", "server", "--l1-size-gb", "10", "--chunk-size", "16", "--l2-adapter", _RESP, "--port", "6555"],
        {
            "l1": {"size": "10GiB"},
            "chunk_tokens": 16,
            "server": _SOCKET,
            "l2": [
                {
                    "storage": {"plugin": "redis", "url": "redis://localhost:6379", "connections": 8},
                    "capacity": "10GiB",
                }
            ],
        },
        set(),
    ),
    (
        "disk as a write buffer",
        ["lmcache", "server", "--l1-size-gb", "32", "--l1-use-lazy", "--eviction-policy", "noop", "--l2-store-policy",
         "skip_l1", "--l2-adapter",
         '{"type": "fs_native", "base_path": "/data/l2", "num_workers": 32, "use_odirect": true}'],
        {
            "l1": {"size": "32GiB", "eviction": "lru"},
            "server": _SOCKET,
            "l2": [{"storage": {"plugin": "disk", "path": "/data/l2", "capacity": "auto"}}],
        },
        {"l1-use-lazy", "l2-store-policy", "num_workers"},
    ),
    (
        "s3, then redis",
        ["lmcache", "server", "--l1-size-gb=20", "--http-host", "0.0.0.0", "--http-port", "9000", "--prometheus-port",
         "9090", "--l1-read-ttl-seconds", "300", "--l2-adapter",
         '{"type": "s3", "s3_endpoint": "s3.internal:8111", "s3_region": "us-east-1", "s3_addressing_style": "path",'
         ' "s3_bucket": "lmcache", "s3_ca_bundle": "/etc/ca.pem", "aws_secret_access_key": "hunter2"}',
         "--l2-adapter",
         '{"type": "valkey", "startup_nodes": "a:1,b:2", "cluster_mode": true, "password": "hunter2",'
         ' "tls_enable": true, "ttl_seconds": 60, "serde": {"type": "fp8"}}'],
        {
            "l1": {"size": "20GiB", "lease": "300s"},
            "server": {"url": "unix:///run/kvcore/kvcore.sock", "http": "127.0.0.1:9000"},
            "l2": [
                {
                    "storage": {
                        "plugin": "s3",
                        "bucket": "lmcache",
                        "endpoint": "https://s3.internal:8111",
                        "region": "us-east-1",
                        "addressing": "path",
                        "ca_bundle": "/etc/ca.pem",
                    }
                },
                {
                    "storage": {
                        "plugin": "redis",
                        "url": "rediss://a:1,b:2",
                        "cluster": True,
                        "password_env": "REDIS_PASSWORD",
                        "ttl": "60s",
                    },
                    "serde": [{"plugin": "quant", "format": "fp8"}],
                },
            ],
            "metrics_port": 9090,
        },
        set(),
    ),
    (
        "mooncake and nixl",
        ["--l1-size-gb", "20", "--eviction-policy", "ARC", "--no-l1-use-lazy", "--l2-adapter",
         '{"type": "mooncake_store", "num_workers": 4, "local_hostname": "node", "metadata_server": "P2PHANDSHAKE",'
         ' "master_server_addr": "m:50051", "protocol": "rdma", "rdma_devices": "mlx5_0", "global_segment_size": 0}',
         "--l2-adapter",
         '{"type": "nixl_store", "backend": "POSIX", "pool_size": 8,'
         ' "backend_params": {"file_path": "/mnt/nixl", "use_direct_io": "true", "max_capacity_gb": "10"}}'],
        {
            "l1": {"size": "20GiB", "eviction": "s3fifo"},
            "server": _SOCKET,
            "l2": [
                {
                    "storage": {
                        "plugin": "mooncake",
                        "master_server_address": "m:50051",
                        "metadata_server": "P2PHANDSHAKE",
                        "local_hostname": "node",
                        "protocol": "rdma",
                        "device_name": "mlx5_0",
                        "global_segment_size": "0B",
                    }
                },
                {"storage": {"plugin": "nixl", "backend": "posix", "path": "/mnt/nixl"}, "capacity": "10GiB"},
            ],
        },
        {"l1-use-lazy", "num_workers", "pool_size"},
    ),
    (
        "others",
        ["--l1-size-gb", "20", "--engine-type", "blend", "--p2p-advertise-url", "me:1", "--not-a-flag", "1",
         "--l2-adapter", '{"type": "hf3fs", "mount_point": "/mnt"}'],
        {"l1": {"size": "20GiB"}, "server": _SOCKET},
        {"engine-type", "p2p-advertise-url", "not-a-flag", "type", "mount_point"},
    ),
)  # fmt: skip
