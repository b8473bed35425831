"""Arguments of vLLM that are not settings of ours: those that change nothing here, and those that would change an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

IGNORED: Final = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
    allowed_local_media_path allowed_media_domains async_scheduling attention_backend attention_config
    block_table_size code_revision collect_detailed_traces compilation_config cp_kv_cache_interleave_size
    cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cuda_graph_sizes cudagraph_capture_sizes
    cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
    data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate device_ids disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests
    disable_log_stats disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds
    download_dir dp_sync_interval ec_manager_config elastic_ep_max_dp_size enable_batch_sharded_sampling
    enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
    enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
    enable_logging_iteration_details enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
    enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats
    enable_moe_shared_loras enable_nccl_comm_suspend enable_prompt_tokens_details enable_shm_tensor_arena
    enable_sleep_mode enable_tower_connector_lora enable_trace_replay enforce_eager engram_config eplb_config
    expert_placement_strategy fail_on_environ_validation fault_tolerance_config fully_sharded_loras
    gdn_prefill_backend guided_decoding_backend hf_token ignore_patterns interleave_mm_strings ir_op_priority
    jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config
    kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample kv_events_config kv_offloading_backend
    kv_offloading_size kv_sharing_fast_prefill language_model_only limit_mm_per_prompt linear_backend
    log_config_file log_level logging_config long_prefill_token_threshold_adaptive lora_dtype lora_target_modules
    mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
    mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size
    max_lora_cls_labels max_num_active_seqs max_num_scheduled_tokens max_parallel_loading_workers
    max_seq_len_to_capture media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
    mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model_impl
    model_loader_extra_config moe_backend nnodes node_rank num_scheduler_steps numa_bind numa_bind_cpus
    numa_bind_nodes offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step
    optimization_level otlp_traces_endpoint per_request_spec_decode_metrics performance_mode preemption_mode
    prefix_cache_retention_interval prefix_caching_hash_algo profiler_config pt_load_map_location
    ray_workers_use_nsight renderer_num_workers replayssm_buffer_len revision safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_delay_factor
    show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names sparse_indexer_topk_backend
    aux_output_config default_mm_loras diffusion_config prefill_schedule_interval prefix_match_unit swa_bounded_replay
    video_pruning_rate
    specialize_active_lora stream_interval structured_outputs_config swap_space tokenizer_revision trust_remote_code
    ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load use_v2_block_manager video_pruning_method
    weight_transfer_config worker_cls worker_extension_cls
    """.split()  # noqa: SIM905 - two hundred words, one a line, would be a file to scroll through
)
"""Accepted, so that a folder made for vLLM loads: devices and kernels, logs, loading, images and sound, caches beyond ours."""

UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "config_format": ("auto", "hf"),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "disable_sliding_window": (False,),
    "ec_transfer_config": (),
    "enable_prompt_embeds": (False,),
    "enable_return_routed_experts": (False,),
    "hf_config_path": (),
    "hf_overrides": ({},),
    "io_processor_plugin": (),
    "kv_transfer_config": (),
    "logits_processors": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "model_class_overrides": ({},),
    "model_weights": ("",),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "quantization_config": (),
    "reasoning_config": (),
    "reasoning_parser_plugin": ("",),
    "return_sampling_mask": (False,),
    "rope_scaling": ({},),
    "rope_theta": (),
    "scheduler_cls": (),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto", "hf", "slow"),
    "tokens_only": (False,),
    "watermark_config": (),
}
"""What would change answers, or what can be asked: refused, unless with these values, which ask for nothing."""
