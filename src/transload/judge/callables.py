"""Names that run code, open files or reach further names, by package, reason and their last component.

Written by scripts/callables.py, last with Python 3.11.7, torch 2.13.0+cpu and numpy 2.4.6.
"""

from __future__ import annotations

WORDS = {
    "stdlib": {
        "runs code, or imports what it is given": """
            ForwardRef _cmp_fn _create_fn _create_formatters _create_parser _disassemble_str _evaluate
            _extract_caret_anchors_from_line_segment _find_mac_near_keyword _find_mac_under_heading
            _frozen_get_del_attr _get_code_object _getcategory _hash_fn _init_fn _install_handlers _main _make_nmtuple
            _namedtuple _parse _repr_fn _resolve _setoption _signature_from_builtin _signature_from_callable
            _signature_from_function _signature_fromstr _try_compile aot_module_simplified c2py configure_formatter
            decode_long dump getDOMImplementation get_annotations getmodulename literal_eval load magic_trace main
            makePickle make_parser namedtuple optimize parse read_file read_long1 read_long4 read_module
        """,
        "opens, reads or writes files": """
            Aifc_read Aifc_write ArgumentDefaultsHelpFormatter Au_read Au_write BaseRotatingHandler BufferedRWPair
            BufferedRandom Catalog HelpFormatter IncrementalDecoder IncrementalEncoder IncrementalNewlineDecoder
            MetavarTypeHelpFormatter RawDescriptionHelpFormatter RawTextHelpFormatter ThreadingTCPServer
            TimedRotatingFileHandler TracebackException WatchedFileHandler Wave_read Wave_write _Printer__setup
            _arp_getnode _builtin_open _connect_unixsocket _do_cmp _extract_from_extended_frame_gen
            _finish_end_element _finish_start_element _formatwarning_orig _formatwarnmsg _formatwarnmsg_impl
            _get_writer _read_args_from_files _scandir _statstream available_timezones bz2_decode bz2_encode check
            chmod cmp createSocket decode default_loader dgettext dngettext dnpgettext doRollover dpgettext encode
            expanduser external_entity_ref extract_tb find find_tzfile findsource format formatwarning
            getFilesToDelete getabsfile getcomments getframeinfo getpass getregentry getsourcefile getsourcelines
            getuser hardlink_to include init install iterdir iterparse listen load_tzdata makeSocket make_msgid
            min_cut_rematerialization_partition minifier mkdir netrc normalize open open_code parseFragment
            prepare_input_source read read_bytes read_mime_types read_text readlink removeAttributeNode
            removeAttributeNodeNS rename reopenIfNeeded replace reset resolveEntity rmdir rotate setNamedItem
            shouldRollover stat symlink_to test test_aifc test_wav testall touch translation unix_getpass unlink what
            whathdr write write_bytes write_text write_value
        """,
        "reaches further names": """
            _compose_mro _find_impl _makecodes _print_locale getclosurevars
        """,
    },
    "torch": {
        "runs code, or imports what it is given": """
            Application CUDAPluggableAllocator CeilDiv CuptiMonitor DumpUnpickler ForwardRef LatticeOp Max Min
            MinMaxBase Number PT2ArchiveReader PackageImporter PyTorchFileReader XPUPluggableAllocator _CPUinfo
            _IterDataPipeSerializationWrapper _MapDataPipeSerializationWrapper _StringLoader
            _TorchCompileInductorWrapper _augment_memory_snapshot_stack_traces _broadcast_object
            _call_custom_autograd_function_in_pre_dispatch _capture _check_cuda _check_graph_module
            _check_module_exists _collect_examples _compile_kernel _convert_guards_code_to_fn _cuda_load_module
            _cupti_version _current_thread_resource_tuple _decode_c_string _decode_record _defaultdict_deserialize
            _derived_name _device_count_amdsmi _device_count_nvml _dispatch_impl
            _do_instantiate_remote_module_template _dump_snapshot _enum_zes_device_infos _eval_no_call
            _export_to_torch_ir _fa3_import_module _format_viz _fx _get_amdsmi_device_index _get_cuda_library
            _get_gpu_rtc_library _get_gpu_runtime_library _get_hip_runtime_library _get_hiprtc_library
            _get_module_and_submodules _get_node_type _get_nvml_device_index _get_nvrtc_library _get_raw_tensor_bytes
            _get_results _get_torch_jit_trace_forward_signature _get_win_folder_with_ctypes _get_zes_engine_handle
            _get_zes_frequency_handle _get_zes_power_handle _get_zes_temperature_handle _import_dotted_name
            _install_config_module _is_valid_module _json_to_treespec _list_connected_datapipes _load_constants
            _load_dynamic_shapes _load_global_deps _load_state_dict _new_process_group_helper _nvrtc_compile
            _object_to_tensor _open_zipfile_reader _package_constants _parse_sym_expr _partial_read
            _patch_random_functions _pickler _preload_cuda_deps _preload_cuda_lib _process_completed_buffer
            _process_group_color _raw_device_count_nvml _raw_device_count_zes _raw_device_uuid_amdsmi
            _raw_device_uuid_nvml _record_current_thread_info _recursive_script_module_receiver
            _recursive_script_module_reducer _resolve_mutated_flat_indices _result_string _run_async _setup_prototypes
            _snapshot _stop_run _sympifyit _tensor_to_object _torchscript_schema_to_signature_impl
            _torchscript_type_to_python_type _trace_window_entries _traverse_helper _type _unavailable_reason
            _unlift_exported_program_lifted_states _unpatch_random_functions _unpickler _use_uvm _wait_for_running
            _warn_nvmath_unavailable_once _write_raw_buffer _zes_ensure_device_infos _zes_get_memory_handle
            all_gather_object allow_in_pre_dispatch_graph broadcast_object_list build_With build_db
            build_groups_memberships build_ignore_context_manager byref c_double c_uint32 c_void_p cast check check_fn
            clock_rate compose_fn compute_tensor_metadata compute_unbacked_bindings config_from_args
            consolidate_state_dict constant custom_op decode_long deserialize deserialize_torch_artifact
            device_memory_used enable_hes_early enum_object_hook equal_valued eval exec_module find_device_library
            find_spec finish format_flamegraph from_python_class gather_object get_annotations get_clean_triton
            get_fburl get_info_and_burn_skeleton get_jit_class_def get_jit_def get_model_info get_strobelight_url
            get_value hash_storage import_ir_module import_ir_module_from_buffer import_module infer_schema
            install_config_module instantiate_non_scriptable_remote_module_template
            instantiate_scriptable_remote_module_template is_numactl_available lazy_deprecated_import load load_bytes
            load_library load_pt2 load_url main memory_usage namedtuple ordered parse_def parse_type_line patch
            pointer pop_user_annotation power_draw process_file profile_plot push_user_annotation read read_data
            read_dump read_metadata read_storage read_tensor_metadata recv_checkpoint recv_object_list
            refine_dynamic_shapes_from_suggested_fixes register_callbacks register_flash_attention_fa3
            register_timestamp_callback report_compile_source_on_error requires_nvshmem run_node run_script_path
            safe_gcd save_stats scatter_object_list segment_plot send_checkpoint send_object_list serialize_treespec
            set_default_tensor_type set_logs set_shared_memory_config simple_floordiv_gcd storage_to_tensor_type
            sympify temperature torch_save_to_dcp trace_plot transform_ft triton_kernel_wrapper_mutation_dense
            triton_op try_duck_specialization_first try_import unpackage_script_module utilization write_to
        """,
        "opens, reads or writes files": """
            CaptureStructuredTrace DefaultLogsSpecs GdsFile LazyTraceHandler NamedTemporaryFile PT2ArchiveWriter
            PackageExporter PyTorchFileWriter RawTextHelpFormatter ThreadingHTTPServer ZipFile _DefaultLogsSpecs
            _IPv6HTTPServer _ProcessGroupInitInfo _ReplicationStager _backport_for_mobile
            _backport_for_mobile_to_buffer _bind_all_threads_in_current_process_to_logical_cpus _close_stream
            _cls_init _compiled_and_package _consolidate_safetensors_files _core_complex_get_logical_cpus_to_bind_to
            _deserialize_single_cache _dump_chrometrace _dump_csv _embed_headers
            _exclusive_get_logical_cpus_to_bind_to _extern_libs_key _gather_tunableop_results
            _gather_unique_untuned_gemm_from_files _get_allowed_logical_cpu_indices_for_numa_node
            _get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED _get_cuda_dep_paths _get_fq_hostname
            _get_gpu_indices_for_numa_node _get_logical_cpu_indices_sharing_same_physical_core_as
            _get_logical_cpus_sharing_same_max_level_cache_as _get_mobile_model_contained_types
            _get_model_bytecode_version _get_model_ops_and_info _get_numa_node_index_for_gpu_index
            _get_numa_node_indices_for_socket_index _get_sac_tradeoff_pwlf_stats _get_socket_index_for_cpu
            _get_socket_index_for_numa_node _get_systemwide_numa_node_indices _get_validated_logical_cpus_to_bind_to
            _legacy_load _load_csv _load_events _load_exported_programs _load_for_lite_interpreter
            _load_quantization_metadata _make_distributed_pdb _maybe_apply_numa_binding_to_current_process
            _node_get_logical_cpus_to_bind_to _open_binary_append _open_file _open_outputs _open_zipfile_writer_buffer
            _open_zipfile_writer_file _package_aoti_files _package_executorch_files _package_exported_programs
            _package_state_dict _persist_state_dict _pid_namespace _pid_namespace_link _prefix_regex
            _process_output_file _raise_if_binding_invalid _run _save_memory_usage _save_pickled_tensors
            _save_raw_tensors _save_segment_usage _serialize_single_cache _socket_get_logical_cpus_to_bind_to
            _staged_schema _torch_profile _try_get_data _write_data _write_files_from_queue _write_item
            _write_meta_file _write_metadata _write_overall_metadata_file add_lib_preload breakpoint
            build_execution_trace_obs_from_env bump_version_if_changed consolidate_safetensors_files
            consolidate_safetensors_files_on_every_rank create_stream dcp_to_torch_save dump embed_headers emit enable
            expanduser export_as_test_case export_chrome_trace export_data export_memory_timeline
            export_memory_timeline_html export_memory_timeline_raw export_stacks extract_ir file_add_header
            file_specific_replacement forward generate_json_dump get_flatbuffer_module_info get_free_port
            get_inline_skeleton get_loc get_resources_dir get_resources_dir_for_et_path get_writable_path gethostname
            hash_source_files hipify initialize_inference_session is_pt2_package isfile load_nvprof load_op_profiles
            load_test_case load_trace log_comm_debug_tracing_table_to_file makedirs matched_files_iter
            merge_trace_window_into_chrome_trace mgpu_tune_gemm_in_file mkdir mkdtemp open openf
            package_nativert_with_aoti_delegate package_pt2 parse_nvprof_trace prepare_local_plan prepare_trace
            preprocess_file_and_save_result preprocessor print_op_coverage_summary profile read_dir read_file read_str
            read_string register_callback release report_all_anti_patterns rm_file save save_op_profiles save_trace
            serialize serialize_torch_artifact set_memory_allocator site_config_dir site_data_dir start
            start_debug_server tensorboard_trace_handler transform_object try_acquire tune_gemm_in_file
            unregister_callback update_schema user_cache_dir user_config_dir user_data_dir user_log_dir user_state_dir
            validate_checkpoint_id validate_trace verify wait warn_tensor_cycles write write_file write_folder
            write_storage write_str write_string write_tensor
        """,
        "reaches further names": """
            _disable_dynamo_if_unsupported _export _extract_callable_leaves _extract_callable_pytree _flatten
            _flatten_with_keys _is_globals_or_locals _patch_function _try_getclosurevars create_args_for_root
            find_legit_leaks_from_referrers from_type get_inner_triton_kernels issubdtype lazy_compile trace
        """,
    },
    "numpy": {
        "runs code, or imports what it is given": """
            _array_method_doc _concrete_ndptr _ctype_from_dtype _ctype_from_dtype_structured _dump _dumps
            _from_ctypes_array _from_ctypes_structure _from_ctypes_union _getintp_ctype _makenamedict _ndptr
            _ndptr_base _ufunc_reconstruct add_newdoc add_newdoc_for_scalar_type as_array c_intp
            dtype_from_ctypes_type info load namedtuple read_array write_array
        """,
        "opens, reads or writes files": """
            DataSource NpzFile Repository _FileOpeners _cache _get_platform_and_machine _load _open _read _savez array
            exists fromfile fromregex fromtextfile genfromtxt isfileobj listdir load_library loadtxt memmap open
            open_memmap openfile recfromcsv recfromtxt save savetxt savez savez_compressed show_runtime
            zipfile_factory
        """,
        "reaches further names": """
            _override___module__
        """,
    },
}
